//! Loaders whose batches are shared out among the ranks.

pub(crate) mod dispatch;
pub(crate) mod placement;
pub(crate) mod position;
mod staged;

use std::fmt;
use std::sync::Arc;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_data::{
    Batch, BatchedDataset, Collate, DataLoader, Epoch, IterableDataset, LoaderOptions,
    ShardOptions, StreamLoader,
};
use brigade_torch::{Device, DeviceExt, Tensor, TensorTree, elements};

use crate::error::{Error, Result};
use crate::gradients::join::EvenBatches;
use crate::job::Job;
use crate::loader::dispatch::Dispatch;
use crate::loader::position::{Counting, SavedLoader};
use crate::loader::staged::StagedEpoch;
use crate::processes::Processes;
use crate::registry::Registry;
use crate::stateful::{HookError, Stateful};

/// How batches are shared out among the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataLoaderConfiguration {
    /// A loader's batch size is that of all ranks together: each takes its part of every batch; false.
    pub split_batches: bool,
    /// All ranks get the same number of equally large batches, completed with duplicates that metrics leave
    /// out; true.
    pub even_batches: bool,
    /// Rank 0 reads the data and sends every rank its part; false.
    pub dispatch_batches: bool,
}

impl Default for DataLoaderConfiguration {
    fn default() -> Self {
        Self { split_batches: false, even_batches: true, dispatch_batches: false }
    }
}

/// A loader after [`crate::Accelerator::prepare`] or [`PreparedLoader::new`]: this rank's batches, on this rank's
/// device.
///
/// Each iteration is an epoch, with an order that all ranks agree on.
pub struct PreparedLoader<L> {
    pub(crate) saved: Arc<SavedLoader<L>>,
    job: Arc<Job>,
    even_batches: Arc<EvenBatches>,
    dispatch: bool,
}

impl<L: Loader + 'static> PreparedLoader<L> {
    /// Shares a loader's batches out among the ranks, for a program without an Accelerator. All ranks take
    /// part: the numbers of samples are compared, and rank 0's seed is taken.
    ///
    /// ```
    /// use brigade_data::DataLoader;
    /// use brigade_datasets::Digits;
    /// use brigade_train::{ConnectOptions, DataLoaderConfiguration, PreparedLoader, Processes};
    ///
    /// let processes = Processes::join(ConnectOptions { cpu: true, ..Default::default() })?;
    /// let loader = DataLoader::new(Digits::test()?).batch_size(100);
    /// let loader = PreparedLoader::new(loader, &processes, DataLoaderConfiguration::default())?;
    /// for batch in &loader {
    ///     let (images, labels) = batch?.into_data();
    ///     assert_eq!(images.size()[0], labels.size()[0]);
    /// }
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::LoadersDiffer`] for unequal data sets, [`Error::NoBatch`] for data without a batch,
    /// [`Error::Torch`] when a peer is gone.
    pub fn new(
        loader: L,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
    ) -> Result<Self> {
        Self::joined(loader, processes, configuration, Arc::default())
    }

    /// As [`PreparedLoader::new`], under the rule of an Accelerator's joins, and registered for its checkpoints.
    pub(crate) fn registered(
        loader: L,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
        even_batches: &Arc<EvenBatches>,
        registry: &Registry,
    ) -> Result<Self> {
        let even_batches = Arc::clone(even_batches);
        let prepared = Self::joined(loader, processes, configuration, even_batches)?;
        registry.register(&prepared.saved);
        Ok(prepared)
    }

    fn joined(
        loader: L,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
        even_batches: Arc<EvenBatches>,
    ) -> Result<Self> {
        let loader = loader.shared_out(processes, configuration)?;
        let dispatch = configuration.dispatch_batches && processes.use_distributed();
        let saved = Arc::new(SavedLoader::new(loader));
        Ok(Self { saved, job: Arc::clone(&processes.job), even_batches, dispatch })
    }
}

/// The order's seed, and the position in it, as of [`crate::Accelerator::save_state`].
impl<L: Loader> Stateful for PreparedLoader<L> {
    fn state_dict(&self) -> Result<Value<Tensor>, HookError> {
        self.saved.state_dict()
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        self.saved.check_state_dict(state)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<(), HookError> {
        self.saved.load_state_dict(state)
    }
}

impl<L> PreparedLoader<L> {
    /// The loader under the preparation: its options, its epoch, `set_epoch`, `set_skip_batches`.
    #[must_use]
    pub fn inner(&self) -> &L {
        &self.saved.loader
    }
}

impl<D: BatchedDataset> PreparedLoader<DataLoader<D>> {
    /// Batches of this rank in an epoch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner().len()
    }

    /// Whether this rank has no batch.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner().is_empty()
    }
}

/// What both kinds of loader can do: begin an epoch, and go on where another run has stopped.
pub trait Loader: Send + Sync {
    /// The data of a batch.
    type Data: TensorTree<Owned = Self::Data> + Send + 'static;

    /// Makes it this rank's part of the data. All ranks take part, and agree on the seed of the order.
    ///
    /// # Errors
    /// As [`PreparedLoader::new`].
    fn shared_out(
        self,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
    ) -> Result<Self>
    where
        Self: Sized;

    /// Begins the next epoch.
    fn begin(&self) -> Epoch<Self::Data>;

    /// Counts an epoch that another rank reads.
    fn pass(&self);

    /// Overrides whether ranks get equally many batches, where the loader can.
    fn override_even_batches(&self, _even: Option<bool>) {}

    /// The number of the epoch that begins next.
    fn next_epoch(&self) -> u64;

    /// The seed of the order.
    fn order_seed(&self) -> u64;

    /// Makes the next epoch go on after `samples` samples of its order and then `batches` batches.
    fn resume(&self, seed: u64, epoch: u64, samples: usize, batches: usize);
}

impl<D> Loader for DataLoader<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    type Data = D::Batch;

    fn shared_out(
        self,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
    ) -> Result<Self> {
        let options = shard_options(configuration);
        let samples = self.dataset().num_samples() as i64;
        let seed = self.options().seed;
        let (samples, seed) = agree(processes, samples, seed, configuration.dispatch_batches)?;
        let device = self.options().device.unwrap_or_else(|| processes.device());
        let agreed = self.seed(seed).device(device);
        let LoaderOptions { batch_size, drop_last, .. } = *agreed.options();
        // A run without a step is never what was meant; all ranks see the same numbers here.
        if samples == 0 || (drop_last && samples < batch_size as i64) {
            return Err(Error::NoBatch { samples, batch_size });
        }
        let (rank, world) = (processes.process_index(), processes.num_processes());
        Ok(match (world, configuration.dispatch_batches) {
            (1, _) => agreed,
            (_, false) => agreed.shard(rank, world, options)?,
            (_, true) => agreed.dispatch(world, options)?,
        })
    }

    fn begin(&self) -> Epoch<D::Batch> {
        self.iter()
    }

    fn pass(&self) {
        self.set_epoch(self.epoch() + 1);
        self.set_skip_batches(0);
        self.set_skip_samples(0);
    }

    fn next_epoch(&self) -> u64 {
        self.epoch()
    }

    fn order_seed(&self) -> u64 {
        self.current_seed()
    }

    fn resume(&self, seed: u64, epoch: u64, samples: usize, batches: usize) {
        self.set_seed(seed);
        self.set_epoch(epoch);
        self.set_skip_samples(samples);
        self.set_skip_batches(batches);
    }

    fn override_even_batches(&self, even: Option<bool>) {
        Self::override_even_batches(self, even);
    }
}

impl<I> Loader for StreamLoader<I>
where
    I: IterableDataset + 'static,
    <I::Sample as Collate>::Batch: TensorTree<Owned = <I::Sample as Collate>::Batch>,
{
    type Data = <I::Sample as Collate>::Batch;

    fn shared_out(
        self,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
    ) -> Result<Self> {
        let options = shard_options(configuration);
        let seed = self.options().seed;
        let (_, seed) = agree(processes, -1, seed, configuration.dispatch_batches)?;
        let device = self.options().device.unwrap_or_else(|| processes.device());
        let agreed = self.seed(seed).device(device);
        let (rank, world) = (processes.process_index(), processes.num_processes());
        Ok(match (world, configuration.dispatch_batches) {
            (1, _) => agreed,
            (_, false) => agreed.shard(rank, world, options)?,
            (_, true) => agreed.dispatch(world, options)?,
        })
    }

    fn begin(&self) -> Epoch<Self::Data> {
        self.iter()
    }

    fn pass(&self) {
        self.set_epoch(self.epoch() + 1);
        self.set_skip_batches(0);
        self.set_skip_samples(0);
    }

    fn next_epoch(&self) -> u64 {
        self.epoch()
    }

    fn order_seed(&self) -> u64 {
        self.current_seed()
    }

    fn resume(&self, seed: u64, epoch: u64, samples: usize, batches: usize) {
        self.set_seed(seed);
        self.set_epoch(epoch);
        self.set_skip_samples(samples);
        self.set_skip_batches(batches);
    }
}

/// One epoch of a prepared loader.
pub struct Batches<T> {
    source: Source<T>,
    job: Arc<Job>,
    remaining: Option<usize>,
    counting: Counting,
}

enum Source<T> {
    /// This rank reads its own.
    Own(Epoch<T>),
    /// The same, copied to a GPU one batch ahead.
    Staged(StagedEpoch<T>),
    /// Rank 0 reads for all.
    Dispatched(Dispatch<T>),
}

impl<L: Loader + 'static> PreparedLoader<L> {
    /// Begins the next epoch. In dispatch mode every rank must.
    ///
    /// On a GPU a thread of its own takes the batches from the loader, puts them into pinned memory, and has them
    /// copied on a stream beside the computation, one batch ahead of the loop. What the loader's threads, or without
    /// threads this one, compute on the GPU is beside the computation, too; batches that lie there are handed on.
    #[must_use]
    pub fn iter(&self) -> Batches<L::Data> {
        let loader = self.inner();
        loader.override_even_batches(self.even_batches.get());
        let counting = self.saved.position.begin(loader.next_epoch());
        let source = match (self.job.group(), self.dispatch) {
            (Some(group), true) => {
                let epoch = if self.job.rank() == 0 {
                    Some(loader.begin())
                } else {
                    loader.pass();
                    None
                };
                Source::Dispatched(Dispatch::new(&group, epoch))
            }
            _ if self.job.device.device_kind().is_some() => {
                let saved = Arc::clone(&self.saved);
                Source::Staged(StagedEpoch::new(move || saved.loader.begin(), self.job.device))
            }
            _ => Source::Own(loader.begin()),
        };
        let remaining = match &source {
            Source::Own(epoch) => epoch.remaining(),
            Source::Staged(epoch) => epoch.remaining(),
            Source::Dispatched(dispatch) => dispatch.remaining(),
        };
        Batches { source, job: Arc::clone(&self.job), remaining, counting }
    }
}

impl<L: Loader + 'static> IntoIterator for &PreparedLoader<L> {
    type Item = Result<Batch<L::Data>>;
    type IntoIter = Batches<L::Data>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: TensorTree<Owned = T>> Iterator for Batches<T> {
    type Item = Result<Batch<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match &mut self.source {
            Source::Own(epoch) => epoch.next()?.map_err(Error::from),
            Source::Staged(epoch) => epoch.next()?,
            Source::Dispatched(dispatch) => dispatch.next()?,
        };
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(1);
        }
        match &batch {
            Ok(batch) => self.counting.count(batch.index(), batch.round()),
            Err(_) => self.counting.count_failed(),
        }
        let device = self.job.device;
        let batch = match &self.source {
            // Over the group, batches come on the device of its messages.
            Source::Dispatched(_) if device != Device::Cpu => {
                batch.and_then(|batch| batch.try_map(|data| Ok(data.to_device(device)?)))
            }
            _ => batch,
        };
        Some(self.job.explain_memory("the copy of a batch", batch))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining.unwrap_or(0), self.remaining)
    }
}

impl<L: fmt::Debug> fmt::Debug for PreparedLoader<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedLoader")
            .field("loader", &self.saved.loader)
            .field("dispatch", &self.dispatch)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Batches<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches").field("remaining", &self.remaining).finish_non_exhaustive()
    }
}

fn shard_options(configuration: DataLoaderConfiguration) -> ShardOptions {
    ShardOptions {
        split_batches: configuration.split_batches,
        even_batches: configuration.even_batches,
        ..ShardOptions::default()
    }
}

/// Compares the number of samples across ranks and gives rank 0's seed. In dispatch mode only rank 0's
/// data are read, so others may differ.
fn agree(processes: &Processes, samples: i64, seed: u64, dispatch: bool) -> Result<(i64, u64)> {
    let Some(group) = processes.group() else {
        return Ok((samples, seed));
    };
    let seed = i64::from_ne_bytes(seed.to_ne_bytes());
    let mine = Tensor::from_slice(&[samples, seed]).f_to_device(group.device())?;
    let all = group
        .all_gather(&mine)?
        .iter()
        .map(|pair| {
            let pair = pair.f_to_device(Device::Cpu)?;
            let pair = elements::<i64>(&pair)?.to_vec();
            Ok((pair[0], pair[1]))
        })
        .collect::<Result<Vec<_>>>()?;
    let (expected, seed) = all[0];
    let different = all.iter().position(|&(found, _)| found != expected);
    if let (false, Some(rank)) = (dispatch, different) {
        return Err(Error::LoadersDiffer { rank, expected, found: all[rank].0 });
    }
    Ok((expected, u64::from_ne_bytes(seed.to_ne_bytes())))
}
