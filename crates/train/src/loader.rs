//! Loaders whose batches are distributed over the ranks.

mod dispatch;
pub(crate) mod placement;
mod position;
pub(crate) mod source;
mod staged;

use std::fmt;
use std::sync::Arc;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_data::{Batch, BatchedDataset, DataLoader, Epoch};
use brigade_torch::{DeviceExt, Error, Result, TensorTree};
use tch::{Device, Tensor};

use crate::gradients::join::EvenBatches;
use crate::job::Job;
use crate::loader::dispatch::Dispatch;
use crate::loader::position::{Counting, Mark, Position};
use crate::loader::source::{DataLoaderConfiguration, Loader};
use crate::loader::staged::StagedEpoch;
use crate::processes::Processes;
use crate::registry::{CheckpointObject, Checkpointed, Kind, Registry, Worlds};
use crate::stateful::{Stateful, stateful_handle};

/// A prepared loader, made by [`crate::Accelerator::prepare`] or [`PreparedLoader::new`]: yields this rank's batches on
/// this rank's device.
///
/// Each iteration is an epoch, with an order that all ranks agree on.
pub struct PreparedLoader<L> {
    inner: Arc<LoaderInner<L>>,
}

/// State of a prepared loader that the program's handle and checkpoints share.
struct LoaderInner<L> {
    loader: L,
    position: Position,
    job: Arc<Job>,
    even_batches: Arc<EvenBatches>,
    dispatch: bool,
}

impl<L: Loader + 'static> PreparedLoader<L> {
    /// Distributes a loader's batches over the ranks, for a program without an Accelerator. All ranks take part: the
    /// numbers of samples are compared, and rank 0's seed is taken.
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
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::TrainError::LoadersDiffer`] for unequal data sets, [`crate::TrainError::NoBatch`] for data without a
    /// batch, [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn new(
        loader: L,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
    ) -> Result<Self> {
        Self::joined(loader, processes, configuration, Arc::default())
    }

    /// Prepares a loader as [`PreparedLoader::new`] does, with the Accelerator's override of even batches, and
    /// registers it for its checkpoints.
    pub(crate) fn registered(
        loader: L,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
        even_batches: &Arc<EvenBatches>,
        registry: &Registry,
    ) -> Result<Self> {
        let even_batches = Arc::clone(even_batches);
        let prepared = Self::joined(loader, processes, configuration, even_batches)?;
        registry.register(&prepared.inner);
        Ok(prepared)
    }

    fn joined(
        loader: L,
        processes: &Processes,
        configuration: DataLoaderConfiguration,
        even_batches: Arc<EvenBatches>,
    ) -> Result<Self> {
        let inner = LoaderInner {
            loader: source::share_out(loader, processes, configuration)?,
            position: Position::default(),
            job: Arc::clone(&processes.job),
            even_batches,
            dispatch: configuration.dispatch_batches && processes.use_distributed(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

impl<L: Loader> PreparedLoader<L> {
    /// Returns the number of the epoch that the next iteration begins, from 0. After
    /// [`load_state`](crate::Accelerator::load_state) it is the epoch in which the checkpoint was saved.
    ///
    /// ```
    /// # use brigade_data::DataLoader;
    /// # use brigade_datasets::Digits;
    /// # use brigade_train::Accelerator;
    /// # let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let train = accelerator.prepare(DataLoader::new(Digits::test()?).batch_size(64))?;
    /// for epoch in train.epoch()..2 {
    ///     for batch in &train {
    ///         let (images, labels) = batch?.into_data();
    ///     }
    ///     assert_eq!(train.epoch(), epoch + 1);
    /// }
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.inner.loader.epoch()
    }

    /// Sets the number of the epoch that the next iteration begins, on every rank; following iterations count up from
    /// it.
    pub fn set_epoch(&self, epoch: u64) {
        self.inner.loader.set_epoch(epoch);
    }

    /// Skips the first `batches` batches of the next epoch, and of no other: for a restart without a checkpoint. A
    /// loader that [`Accelerator::load_state`](crate::Accelerator::load_state) has restored skips them by itself.
    pub fn skip_first_batches(&self, batches: usize) {
        self.inner.loader.set_skip_samples(0);
        self.inner.loader.set_skip_batches(batches);
    }
}

impl<L> PreparedLoader<L> {
    /// Returns the loader that was prepared, with its data set and its options.
    #[must_use]
    pub fn inner(&self) -> &L {
        &self.inner.loader
    }
}

impl<L: Loader> LoaderInner<L> {
    /// Continues the epoch at a mark, with its seed.
    fn resume(&self, seed: u64, mark: Mark, total: u64) {
        self.loader.set_seed(seed);
        self.loader.set_epoch(mark.epoch);
        self.loader.set_skip_samples(mark.base as usize);
        self.loader.set_skip_batches(mark.batches as usize);
        self.position.resume(mark, total);
    }
}

impl<L: Loader> Stateful for LoaderInner<L> {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        Ok(self.position.to_value(self.loader.current_seed(), self.loader.epoch()))
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        position::read(state).map(drop)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.restore(state, &Worlds { saved: 1, current: 1 })
    }
}

impl<L: Loader> Checkpointed for LoaderInner<L> {
    fn kind(&self) -> Kind {
        Kind::Loader
    }

    fn restore(&self, state: &Value<Tensor>, worlds: &Worlds) -> Result<()> {
        let (seed, mut mark, total) = position::read(state).map_err(Error::invalid_argument)?;
        if worlds.saved != worlds.current && mark.batches > 0 {
            // With another number of ranks, rounds have another size, so the rest of the epoch is sharded again.
            mark = Mark { base: mark.samples, batches: 0, ..mark };
        }
        self.resume(seed, mark, total);
        Ok(())
    }

    fn samples(&self) -> Option<u64> {
        Some(self.position.total())
    }
}

stateful_handle!(
    /// Saves the order's seed and the position in it, as [`crate::Accelerator::save_state`] does.
    [<L: Loader>] PreparedLoader<L>, inner
);

impl<L: Loader + 'static> From<&PreparedLoader<L>> for CheckpointObject {
    fn from(loader: &PreparedLoader<L>) -> Self {
        let inner: Arc<LoaderInner<L>> = Arc::clone(&loader.inner);
        Self(inner)
    }
}

impl<D: BatchedDataset> PreparedLoader<DataLoader<D>> {
    /// Returns the number of batches of this rank in an epoch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner().len()
    }

    /// Returns `true` if this rank has no batches.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner().is_empty()
    }
}

/// An iterator over one epoch of a prepared loader.
pub struct Batches<T> {
    source: Source<T>,
    job: Arc<Job>,
    remaining: Option<usize>,
    counting: Counting,
}

enum Source<T> {
    /// Batches that this rank reads itself.
    Own(Epoch<T>),
    /// Batches that this rank reads, copied to a GPU one batch ahead.
    Staged(StagedEpoch<T>),
    /// Rank 0 reads for all.
    Dispatched(Dispatch<T>),
}

impl<L: Loader + 'static> PreparedLoader<L> {
    /// Returns an iterator over the next epoch. In dispatch mode every rank must call it.
    ///
    /// For a GPU, a separate thread takes the batches from the loader, copies them into pinned memory, and from there
    /// to the GPU on a stream beside the computation, one batch ahead of the loop. GPU computations in the loader's
    /// threads (without any, in this separate thread) also overlap with the training step; batches that are on the GPU
    /// already are passed on without a copy.
    #[must_use]
    pub fn iter(&self) -> Batches<L::Data> {
        let LoaderInner { loader, position, job, even_batches, dispatch } = &*self.inner;
        loader.override_even_batches(even_batches.get());
        let counting = position.begin(loader.epoch());
        let source = match (job.group(), dispatch) {
            (Some(group), true) => {
                let epoch = if job.rank() == 0 {
                    Some(loader.begin())
                } else {
                    loader.pass_epoch();
                    None
                };
                Source::Dispatched(Dispatch::new(&group, epoch))
            }
            _ if job.device.device_kind().is_some() => {
                let inner = Arc::clone(&self.inner);
                Source::Staged(StagedEpoch::new(move || inner.loader.begin(), job.device))
            }
            _ => Source::Own(loader.begin()),
        };
        let remaining = match &source {
            Source::Own(epoch) => epoch.remaining(),
            Source::Staged(epoch) => epoch.remaining(),
            Source::Dispatched(dispatch) => dispatch.remaining(),
        };
        Batches { source, job: Arc::clone(job), remaining, counting }
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
            Source::Own(epoch) => epoch.next()?,
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
            // In dispatch mode, batches arrive on the device of the group's messages.
            Source::Dispatched(_) if device != Device::Cpu => {
                batch.and_then(|batch| batch.try_map(|data| data.to_device(device)))
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
            .field("loader", &self.inner.loader)
            .field("dispatch", &self.inner.dispatch)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Batches<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches").field("remaining", &self.remaining).finish_non_exhaustive()
    }
}
