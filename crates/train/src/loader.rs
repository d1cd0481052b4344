//! Loaders whose batches are shared out among the ranks.

pub(crate) mod dispatch;
pub(crate) mod position;

use std::fmt;
use std::sync::Arc;

use brigade_data::{
    Batch, BatchedDataset, Collate, DataLoader, Epoch, IterableDataset, LoaderOptions,
    ShardOptions, StreamLoader,
};
use brigade_torch::{Device, Tensor, TensorTree, elements};

use crate::accelerator::{Accelerator, Job};
use crate::error::{Error, Result};
use crate::gradients::join::EvenBatches;
use crate::loader::dispatch::Dispatch;
use crate::loader::position::{Counting, Placed};
use crate::prepare::Prepare;

/// How the Accelerator shares batches out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoaderRules {
    pub(crate) split_batches: bool,
    pub(crate) even_batches: bool,
    pub(crate) dispatch: bool,
}

impl Default for LoaderRules {
    fn default() -> Self {
        Self { split_batches: false, even_batches: true, dispatch: false }
    }
}

/// A loader after [`Accelerator::prepare`]: this rank's batches, on this rank's device.
///
/// Each iteration is an epoch, with an order that all ranks agree on.
pub struct PreparedLoader<L> {
    placed: Arc<Placed<L>>,
    job: Arc<Job>,
    even_batches: Arc<EvenBatches>,
    dispatch: bool,
}

impl<D> Prepare for DataLoader<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    type Prepared = PreparedLoader<Self>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        let rules = accelerator.options.loader;
        let options = shard_options(rules);
        let world = accelerator.num_processes();
        let samples = self.dataset().num_samples() as i64;
        let seed = self.options().seed;
        let (samples, seed) = agree(accelerator, samples, seed, rules.dispatch)?;
        let agreed = self.seed(seed);
        let LoaderOptions { batch_size, drop_last, .. } = *agreed.options();
        // A run without a step is never what was meant; all ranks see the same numbers here.
        if samples == 0 || (drop_last && samples < batch_size as i64) {
            return Err(Error::NoBatch { samples, batch_size });
        }
        let loader = match (world, rules.dispatch) {
            (1, _) => agreed,
            (_, false) => agreed.shard(accelerator.process_index(), world, options)?,
            (_, true) => agreed.dispatch(world, options)?,
        };
        Ok(PreparedLoader::new(loader, accelerator))
    }
}

impl<I> Prepare for StreamLoader<I>
where
    I: IterableDataset + 'static,
    <I::Sample as Collate>::Batch: TensorTree<Owned = <I::Sample as Collate>::Batch>,
{
    type Prepared = PreparedLoader<Self>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        let rules = accelerator.options.loader;
        let options = shard_options(rules);
        let world = accelerator.num_processes();
        let seed = self.options().seed;
        let (_, seed) = agree(accelerator, -1, seed, rules.dispatch)?;
        let agreed = self.seed(seed);
        let loader = match (world, rules.dispatch) {
            (1, _) => agreed,
            (_, false) => agreed.shard(accelerator.process_index(), world, options)?,
            (_, true) => agreed.dispatch(world, options)?,
        };
        Ok(PreparedLoader::new(loader, accelerator))
    }
}

impl<L: Epochs + 'static> PreparedLoader<L> {
    fn new(loader: L, accelerator: &Accelerator) -> Self {
        let dispatch = accelerator.options.loader.dispatch && accelerator.use_distributed();
        let even_batches = Arc::clone(&accelerator.even_batches);
        let placed = Arc::new(Placed::new(loader));
        accelerator.registry.register(&placed);
        Self { placed, job: Arc::clone(&accelerator.job), even_batches, dispatch }
    }
}

impl<L> PreparedLoader<L> {
    /// The loader under the preparation: its options, its epoch, `set_epoch`, `set_skip_batches`.
    #[must_use]
    pub fn inner(&self) -> &L {
        &self.placed.loader
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
pub trait Epochs: Send + Sync {
    /// The data of a batch.
    type Data: TensorTree<Owned = Self::Data> + Send + 'static;

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

impl<D> Epochs for DataLoader<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    type Data = D::Batch;

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

impl<I> Epochs for StreamLoader<I>
where
    I: IterableDataset + 'static,
    <I::Sample as Collate>::Batch: TensorTree<Owned = <I::Sample as Collate>::Batch>,
{
    type Data = <I::Sample as Collate>::Batch;

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
    device: Device,
    remaining: Option<usize>,
    counting: Counting,
}

enum Source<T> {
    /// This rank reads its own.
    Own(Epoch<T>),
    /// Rank 0 reads for all.
    Dispatched(Dispatch<T>),
}

impl<L: Epochs> PreparedLoader<L> {
    /// Begins the next epoch. In dispatch mode every rank must.
    #[must_use]
    pub fn iter(&self) -> Batches<L::Data> {
        let loader = self.inner();
        loader.override_even_batches(self.even_batches.get());
        let counting = self.placed.position.begin(loader.next_epoch());
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
            _ => Source::Own(loader.begin()),
        };
        let remaining = match &source {
            Source::Own(epoch) => epoch.remaining(),
            Source::Dispatched(dispatch) => dispatch.remaining(),
        };
        Batches { source, device: self.job.device, remaining, counting }
    }
}

impl<L: Epochs> IntoIterator for &PreparedLoader<L> {
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
            Source::Dispatched(dispatch) => dispatch.next()?,
        };
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(1);
        }
        match &batch {
            Ok(batch) => self.counting.count(batch.index(), batch.round()),
            Err(_) => self.counting.count_failed(),
        }
        Some(match self.device {
            Device::Cpu => batch,
            device => batch.and_then(|batch| batch.try_map(|data| Ok(data.to_device(device)?))),
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining.unwrap_or(0), self.remaining)
    }
}

impl<L: fmt::Debug> fmt::Debug for PreparedLoader<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedLoader")
            .field("loader", &self.placed.loader)
            .field("dispatch", &self.dispatch)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Batches<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches").field("remaining", &self.remaining).finish_non_exhaustive()
    }
}

fn shard_options(rules: LoaderRules) -> ShardOptions {
    ShardOptions {
        split_batches: rules.split_batches,
        even_batches: rules.even_batches,
        ..ShardOptions::default()
    }
}

/// Compares the number of samples across ranks and gives rank 0's seed. In dispatch mode only rank 0's
/// data are read, so others may differ.
fn agree(accelerator: &Accelerator, samples: i64, seed: u64, dispatch: bool) -> Result<(i64, u64)> {
    let Some(group) = accelerator.group() else {
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
