//! Options of both loaders, and their positions in the data.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use brigade_sampling::ShardOptions;
use brigade_torch::Result;
use parking_lot::Mutex;
use tch::Device;

use crate::draw_seed;

/// Options of a loader. The builder methods of [`DataLoader`](crate::DataLoader) and
/// [`StreamLoader`](crate::StreamLoader) set them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Number of samples in a batch. Defaults to 1.
    pub batch_size: usize,
    /// `true` to visit the samples in a random order that is new in each epoch. Defaults to `false`.
    pub shuffle: bool,
    /// Seed of the order and of all other random choices. Must be the same on all ranks. Defaults to a number that is
    /// drawn for each loader ([`draw_seed`]).
    pub seed: u64,
    /// `true` to leave out a last batch that is smaller than the others. Defaults to `false`.
    pub drop_last: bool,
    /// Number of threads that make batches. With 0, the calling thread makes each batch when it is requested. Defaults
    /// to 0 for a [`DataLoader`](crate::DataLoader) and 1 for a [`StreamLoader`](crate::StreamLoader).
    pub threads: usize,
    /// Number of batches that are made ahead. Defaults to `None`: two per thread.
    pub prefetch: Option<usize>,
    /// `true` if threads begin the next epoch before it is requested. Defaults to `false`.
    pub overlap_epochs: bool,
    /// GPU on which each thread uses a stream of its own. Defaults to `None`: threads have no streams of their own.
    pub device: Option<Device>,
}

impl LoaderOptions {
    pub(crate) fn with_drawn_seed() -> Self {
        Self {
            batch_size: 1,
            shuffle: false,
            seed: draw_seed(),
            drop_last: false,
            threads: 0,
            prefetch: None,
            overlap_epochs: false,
            device: None,
        }
    }

    /// Returns the number of batches that are in progress at a time if there are threads.
    pub(crate) fn ahead(&self) -> usize {
        self.prefetch.unwrap_or_else(|| self.threads.saturating_mul(2)).max(1)
    }
}

/// The rank whose batches a loader returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardPosition {
    /// The rank; `None` for a dispatcher, which returns whole rounds.
    pub(crate) rank: Option<usize>,
    pub(crate) world: usize,
    pub(crate) options: ShardOptions,
}

impl ShardPosition {
    pub(crate) fn alone() -> Self {
        Self { rank: Some(0), world: 1, options: ShardOptions::default() }
    }

    pub(crate) fn of_rank(rank: usize, world: usize, options: ShardOptions) -> Result<Self> {
        if rank >= world {
            return Err(brigade_sampling::PlanError::RankOutOfRange { rank, world }.into());
        }
        Ok(Self { rank: Some(rank), world, options })
    }

    /// Returns the sharding options to plan with. A process that runs alone does not have to stay in step with others,
    /// so that its last batch is not completed.
    pub(crate) fn rules(&self, drop_last: bool) -> ShardOptions {
        let drop_last = drop_last || self.options.drop_last;
        match self.world {
            1 => ShardOptions { drop_last, even_batches: false, ..ShardOptions::default() },
            _ => ShardOptions { drop_last, ..self.options },
        }
    }
}

/// The position of a loader in the data. It is shared by the loader's clones.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    next_epoch: AtomicU64,
    skip: AtomicUsize,
    /// Override of the rules' `even_batches`: 0 for none, 1 for `false`, 2 for `true`.
    even: AtomicU8,
    /// Number of samples at the start of the next epoch that are left out before the rest is distributed to the ranks.
    offset: AtomicUsize,
    /// Replaces the options' seed if a resumed run continues with the seed of another run.
    seed: Mutex<Option<u64>>,
}

/// The epoch that begins, and the part of it that is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) epoch: u64,
    /// Number of samples that are left out before the first batch.
    pub(crate) offset: usize,
    /// Number of batches of this rank that are left out.
    pub(crate) skip: usize,
}

impl Progress {
    /// Begins an epoch. The number of samples and batches to leave out applies to this epoch only.
    pub(crate) fn begin(&self) -> Start {
        let epoch = self.next_epoch.fetch_add(1, Ordering::Relaxed);
        let offset = self.offset.swap(0, Ordering::Relaxed);
        Start { epoch, offset, skip: self.skip.swap(0, Ordering::Relaxed) }
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset.load(Ordering::Relaxed)
    }

    pub(crate) fn set_offset(&self, samples: usize) {
        self.offset.store(samples, Ordering::Relaxed);
    }

    pub(crate) fn seed(&self) -> Option<u64> {
        *self.seed.lock()
    }

    pub(crate) fn set_seed(&self, seed: u64) {
        *self.seed.lock() = Some(seed);
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.next_epoch.load(Ordering::Relaxed)
    }

    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.next_epoch.store(epoch, Ordering::Relaxed);
    }

    /// Returns the rules with the current override of `even_batches`.
    pub(crate) fn overriding(&self, rules: ShardOptions) -> ShardOptions {
        match self.even.load(Ordering::Relaxed) {
            0 => rules,
            even => ShardOptions { even_batches: even == 2, ..rules },
        }
    }

    pub(crate) fn override_even(&self, even: Option<bool>) {
        self.even.store(even.map_or(0, |even| 1 + u8::from(even)), Ordering::Relaxed);
    }

    pub(crate) fn set_skip(&self, batches: usize) {
        self.skip.store(batches, Ordering::Relaxed);
    }
}

/// Common part of [`DataLoader`](crate::DataLoader) and [`StreamLoader`](crate::StreamLoader), to which both
/// dereference: the options, and the position in the data, which changes during use.
///
/// ```
/// use brigade_data::{DataLoader, dataset_from_fn};
///
/// let rows = dataset_from_fn(8, |index, _seed| Ok((index as i64,)));
/// let loader = DataLoader::new(rows).batch_size(2);
/// assert_eq!((loader.options().batch_size, loader.epoch()), (2, 0));
/// loader.set_epoch(5);
/// loader.set_skip_batches(1);
/// assert_eq!(loader.iter().count(), 3); // what is left of epoch 5
/// assert_eq!(loader.epoch(), 6);
/// ```
#[derive(Clone, Debug)]
pub struct LoaderCore {
    pub(crate) options: LoaderOptions,
    pub(crate) position: ShardPosition,
    pub(crate) progress: Arc<Progress>,
}

impl LoaderCore {
    pub(crate) fn new(options: LoaderOptions) -> Self {
        Self { options, position: ShardPosition::alone(), progress: Arc::default() }
    }

    /// Returns all options, including the seed that was drawn.
    #[must_use]
    pub fn options(&self) -> &LoaderOptions {
        &self.options
    }

    /// Returns the world size: the number of ranks that share the data; 1 before the loader is sharded.
    #[must_use]
    pub fn world(&self) -> usize {
        self.position.world
    }

    /// Returns the number of the epoch that the next iteration begins, from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.progress.epoch()
    }

    /// Sets the number of the epoch that the next iteration begins. Each iteration increases it by 1.
    pub fn set_epoch(&self, epoch: u64) {
        self.progress.set_epoch(epoch);
    }

    /// Advances to the next epoch without an iteration, for an epoch that another process reads in place of this one.
    pub fn pass_epoch(&self) {
        self.progress.begin();
    }

    /// Returns the seed of all random choices: the one that was set last, or else the one that was drawn.
    #[must_use]
    pub fn current_seed(&self) -> u64 {
        self.progress.seed().unwrap_or(self.options.seed)
    }

    /// Sets the seed of a loader that is in use, from its next epoch on.
    pub fn set_seed(&self, seed: u64) {
        self.progress.set_seed(seed);
    }

    /// Sets the number of batches to skip at the start of the next epoch, and of that epoch only, like `skip_batches`
    /// of a loader that is not in use yet.
    pub fn set_skip_batches(&self, batches: usize) {
        self.progress.set_skip(batches);
    }

    /// Sets the number of samples to skip at the start of the next epoch's order, and of that epoch only. The rest is
    /// distributed as if it were the whole epoch, which lets a run continue with another number of ranks, whose batches
    /// do not coincide with the old ones. Batches are counted from 0 again.
    pub fn set_skip_samples(&self, samples: usize) {
        self.progress.set_offset(samples);
    }
}

/// Builder methods for the options of both loaders, which return the loader itself. Everything else that the loaders
/// share is in [`LoaderCore`].
macro_rules! loader_options {
    () => {
        /// Sets the number of samples of a batch. With several ranks, it is that of one rank unless `split_batches` is
        /// set. Defaults to 1.
        #[must_use]
        pub fn batch_size(mut self, batch_size: usize) -> Self {
            self.core.options.batch_size = batch_size;
            self
        }

        /// Sets the seed of all random choices. Defaults to a seed that each loader draws when it is made: at random,
        /// or from the thread's seed ([`set_thread_seed`](crate::set_thread_seed), `Accelerator::set_seed`).
        #[must_use]
        pub fn seed(mut self, seed: u64) -> Self {
            self.core.options.seed = seed;
            self
        }

        /// Sets the GPU on which threads compute the dataset's batches. Each thread gets a GPU stream of its own, so
        /// that gathering, decoding and augmentation on the GPU overlap with the training step. A batch is returned as
        /// soon as its kernels are queued, and the stream of the receiving thread waits for them.
        ///
        /// A loader that an Accelerator prepares has its device. Without threads, batches are computed on the calling
        /// thread's own stream. Has no effect for the CPU.
        ///
        /// ```
        /// use brigade_data::{DataLoader, TensorDataset};
        /// use tch::{Device, Tensor};
        ///
        /// let device = Device::cuda_if_available();
        /// let squares = Tensor::from_slice(&[0f32, 1., 4., 9.]);
        /// let data = TensorDataset::new(squares)?.to_device(device)?;
        /// let loader = DataLoader::new(data).batch_size(2).threads(1).device(device);
        /// for batch in &loader {
        ///     assert_eq!(batch?.device(), device);
        /// }
        /// # Ok::<(), brigade_torch::Error>(())
        /// ```
        #[must_use]
        pub fn device(mut self, device: Device) -> Self {
            self.core.options.device = Some(device);
            self
        }

        /// Sets whether a last batch that is smaller than the others is left out. Defaults to `false`.
        #[must_use]
        pub fn drop_last(mut self, drop_last: bool) -> Self {
            self.core.options.drop_last = drop_last;
            self
        }

        /// Sets the number of batches to skip at the start of the next epoch, and of that epoch only. The batches that
        /// follow are the same as without skipping, including their numbers of valid rows.
        #[must_use]
        pub fn skip_batches(self, batches: usize) -> Self {
            self.core.progress.set_skip(batches);
            self
        }
    };
}
pub(crate) use loader_options;
