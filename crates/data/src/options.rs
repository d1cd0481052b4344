//! Options of both loaders, and their positions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use brigade_sampling::ShardOptions;
use brigade_torch::Result;
use parking_lot::Mutex;
use tch::Device;

use crate::draw_seed;

/// The settings of a loader. The builder methods of [`DataLoader`](crate::DataLoader) and
/// [`StreamLoader`](crate::StreamLoader) set them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Samples of a batch.
    pub batch_size: usize,
    /// Whether the order is new in each epoch.
    pub shuffle: bool,
    /// What the order and all other random choices follow from. Drawn for each loader
    /// ([`draw_seed`]) unless it is given; all ranks must agree on it.
    pub seed: u64,
    /// Whether a smaller last batch is left out.
    pub drop_last: bool,
    /// Threads that make batches; with 0 the calling thread makes each when it is asked for.
    pub threads: usize,
    /// Batches that are made ahead. `None`: two for each thread.
    pub prefetch: Option<usize>,
    /// Whether threads begin the next epoch before it is asked for.
    pub overlap_epochs: bool,
    /// The GPU on which threads compute on streams of their own. `None`: on their default streams.
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

    /// Batches that are out at a time when there are threads.
    pub(crate) fn ahead(&self) -> usize {
        self.prefetch.unwrap_or_else(|| self.threads.saturating_mul(2)).max(1)
    }
}

/// Whose batches a loader gives out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardPosition {
    /// The rank; `None` for a dispatcher, which gives out whole rounds.
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

    /// The rules to plan by: a process that runs alone keeps step with no other, so its last
    /// batch is not completed.
    pub(crate) fn rules(&self, drop_last: bool) -> ShardOptions {
        let drop_last = drop_last || self.options.drop_last;
        match self.world {
            1 => ShardOptions { drop_last, even_batches: false, ..ShardOptions::default() },
            _ => ShardOptions { drop_last, ..self.options },
        }
    }
}

/// How far a loader came; changes while it is shared.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    next_epoch: AtomicU64,
    skip: AtomicUsize,
    /// Overrides the rules' `even_batches`: 0 does not, 1 is false, 2 is true.
    even: AtomicU8,
    /// Samples of the next epoch that are left out before the rest is dealt to the ranks.
    offset: AtomicUsize,
    /// In place of the options' seed, where a run goes on with another one's.
    seed: Mutex<Option<u64>>,
}

/// Which epoch begins, and what of it is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) epoch: u64,
    /// Samples before the first batch.
    pub(crate) offset: usize,
    /// Batches of this rank.
    pub(crate) skip: usize,
}

impl Progress {
    /// Begins an epoch. What is left out is left out of this one only.
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

    /// The rules with what overrides them for now.
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

/// What a [`DataLoader`](crate::DataLoader) and a [`StreamLoader`](crate::StreamLoader) have in common, and
/// dereference to: their options, and the position in the data, which changes while they are in use.
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

    /// Returns all settings, among them the seed that was drawn.
    #[must_use]
    pub fn options(&self) -> &LoaderOptions {
        &self.options
    }

    /// Returns the number of ranks that share the data; 1 before the loader is sharded.
    #[must_use]
    pub fn world(&self) -> usize {
        self.position.world
    }

    /// Returns the number of the epoch that the next iteration begins, from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.progress.epoch()
    }

    /// Makes the next iteration epoch `epoch`; each iteration counts on from there.
    pub fn set_epoch(&self, epoch: u64) {
        self.progress.set_epoch(epoch);
    }

    /// Counts an epoch that another process reads in place of this one.
    pub fn pass_epoch(&self) {
        self.progress.begin();
    }

    /// Returns the seed of all random choices: the one that was given or drawn, or set since.
    #[must_use]
    pub fn current_seed(&self) -> u64 {
        self.progress.seed().unwrap_or(self.options.seed)
    }

    /// Sets the seed of a loader that is in use, from its next epoch on.
    pub fn set_seed(&self, seed: u64) {
        self.progress.set_seed(seed);
    }

    /// Leaves out the first batches of the next epoch, and of that one only, as `skip_batches` of a loader that is
    /// not in use yet.
    pub fn set_skip_batches(&self, batches: usize) {
        self.progress.set_skip(batches);
    }

    /// Leaves out the first samples of the next epoch's order, and of that one only, and deals
    /// the rest out as if it were all: where a run goes on with another number of ranks, whose
    /// batches do not fall on the old ones. Batches count from 0 again.
    pub fn set_skip_samples(&self, samples: usize) {
        self.progress.set_offset(samples);
    }
}

/// The options that both loaders have: methods of a builder, which return the loader itself. All else that they share
/// is in [`LoaderCore`].
macro_rules! loader_options {
    () => {
        /// Sets the number of samples of a batch (1 unless set). With several ranks, it is that of
        /// one rank unless the batches are split.
        #[must_use]
        pub fn batch_size(mut self, batch_size: usize) -> Self {
            self.core.options.batch_size = batch_size;
            self
        }

        /// Sets the seed of all random choices. Without, each loader draws its own when it
        /// is made: at random, or from the thread's seed ([`set_thread_seed`](crate::set_thread_seed),
        /// `Accelerator::set_seed`).
        #[must_use]
        pub fn seed(mut self, seed: u64) -> Self {
            self.core.options.seed = seed;
            self
        }

        /// Sets the GPU that the data set's batches are computed on, for threads: each gets a stream of its own
        /// there, so that what it gathers, decodes or augments on the GPU runs beside the training step. A batch
        /// is given out when its kernels are queued, and what the taking thread does with it comes behind them.
        ///
        /// A loader that an Accelerator prepares has its device. Without threads, batches are computed on the
        /// calling thread's own stream. For the CPU it has no meaning.
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

        /// Leaves out a last batch that is smaller than the others.
        #[must_use]
        pub fn drop_last(mut self, drop_last: bool) -> Self {
            self.core.options.drop_last = drop_last;
            self
        }

        /// Leaves out the first batches of the next epoch, and of that one only. The batches that
        /// follow are the same as without, counts of valid rows included.
        #[must_use]
        pub fn skip_batches(self, batches: usize) -> Self {
            self.core.progress.set_skip(batches);
            self
        }
    };
}
pub(crate) use loader_options;
