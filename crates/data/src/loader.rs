//! The loader for data of known length.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use brigade_sampling::{Order, Sampler, ShardOptions, Shards, Shuffle};
use brigade_torch::{Error, Result, StreamEvent, TensorTree};
use parking_lot::Mutex;
use tch::Device;

use crate::beside::take_over;
use crate::options::{LoaderCore, ShardPosition, Start, loader_options};
use crate::workers::{Work, Workers, guarded};
use crate::{Batch, BatchContext, BatchedDataset, DataError, Epoch, LoaderOptions};

/// Batches of a dataset, epoch after epoch.
///
/// Each iteration is one epoch. Its order follows from the seed and the epoch's number, so it can
/// be repeated, and several ranks with the same seed agree on it without a message. Threads change
/// when batches are made, never what is in them.
///
/// A batch that cannot be made is an error in its place, and the iteration goes on after it; a
/// panic of the dataset is such an error. Dropping an iteration stops its threads.
///
/// ```
/// use brigade_data::{DataLoader, dataset_from_fn};
///
/// let rows = dataset_from_fn(256, |index, _seed| Ok(([index as f32; 8], index % 10)));
/// let loader = DataLoader::new(rows).batch_size(64).shuffle(true).threads(1);
/// for batch in &loader {
///     let (rows, labels) = batch?.into_data(); // f32 [64, 8] and i64 [64]
/// }
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct DataLoader<D> {
    dataset: Arc<D>,
    order: OrderRule,
    core: LoaderCore,
    upcoming: Arc<Mutex<Upcoming>>,
}

/// The [`MapBatches`] of an epoch that threads have begun before it was asked for, and what it was made by.
type Upcoming = Option<(UpcomingKey, Box<dyn Any + Send>)>;

/// What the batches of an epoch follow from besides the data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UpcomingKey {
    epoch: u64,
    seed: u64,
    rules: ShardOptions,
    options: LoaderOptions,
    position: ShardPosition,
}

/// Makes the batches of an epoch as lists of indices, as torch's `BatchSampler`.
///
/// All ranks must make the same ones.
pub trait BatchSampler: fmt::Debug + Send + Sync {
    /// The batches of epoch `epoch`.
    fn batches(&self, epoch: u64) -> Vec<Vec<usize>>;

    /// The size that all batches but the last have. `None` when they vary: then sharding deals them
    /// out whole.
    fn batch_size(&self) -> Option<usize> {
        None
    }
}

#[derive(Clone)]
enum OrderRule {
    /// By the options: in the dataset's order, or shuffled.
    Plain,
    Sampler(Arc<dyn Sampler>),
    Lists(Arc<dyn BatchSampler>),
}

impl<D: BatchedDataset> DataLoader<D> {
    /// Makes a loader of a [`Dataset`](crate::Dataset) or a [`BatchedDataset`]: batches of one sample, in
    /// the dataset's order, made in the calling thread; the methods below change that.
    pub fn new(dataset: D) -> Self {
        Self {
            dataset: Arc::new(dataset),
            order: OrderRule::Plain,
            core: LoaderCore::new(LoaderOptions::with_drawn_seed()),
            upcoming: Arc::default(),
        }
    }
}

impl<D> DataLoader<D> {
    loader_options!();

    /// Lets threads begin the next epoch when the last batch of one is given out, so that its first
    /// batches are there when validation is over. Batches are the same; as many more as are made ahead
    /// lie in memory between two epochs, and are thrown away after the last one or when the seed, the
    /// epoch or the position is set in between. Without threads it has no meaning.
    ///
    /// A data set that counts its reads, or changes between epochs, sees those of the next one early.
    ///
    /// ```
    /// use brigade_data::{DataLoader, dataset_from_fn};
    ///
    /// let rows = dataset_from_fn(64, |index, _seed| Ok((index as i64,)));
    /// let loader = DataLoader::new(rows).batch_size(16).threads(2).overlap_epochs(true);
    /// for _epoch in 0..3 {
    ///     assert_eq!(loader.iter().count(), 4);
    /// }
    /// ```
    #[must_use]
    pub fn overlap_epochs(mut self, overlap: bool) -> Self {
        self.core.options.overlap_epochs = overlap;
        self
    }

    /// Visits the samples in an order that is new in each epoch.
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.core.options.shuffle = shuffle;
        self
    }

    /// Sets the number of threads that make batches ahead; 0 makes each in the calling thread when
    /// it is asked for. They take cores from the training step, so count them in.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.core.options.threads = threads;
        self
    }

    /// Sets how many batches the threads make ahead; two for each thread unless set. That many lie
    /// in memory. Without threads it has no meaning.
    #[must_use]
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.core.options.prefetch = Some(batches);
        self
    }

    /// Visits the samples in the order of `sampler`, in place of [`shuffle`](Self::shuffle). The
    /// sampler has a seed of its own; with several ranks, it must be the same on all.
    #[must_use]
    pub fn sampler(mut self, sampler: impl Sampler + 'static) -> Self {
        self.order = OrderRule::Sampler(Arc::new(sampler));
        self.upcoming = Arc::default();
        self
    }

    /// Takes the batches that `batches` makes, in place of batch size, order and
    /// [`shuffle`](Self::shuffle).
    #[must_use]
    pub fn batch_sampler(mut self, batches: impl BatchSampler + 'static) -> Self {
        self.order = OrderRule::Lists(Arc::new(batches));
        self.upcoming = Arc::default();
        self
    }

    /// The dataset.
    #[must_use]
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Whether the order can differ between processes that were given the same program: it follows
    /// from a seed that was perhaps drawn at random.
    #[must_use]
    pub fn depends_on_seed(&self) -> bool {
        matches!(self.order, OrderRule::Plain) && self.core.options.shuffle
    }
}

/// Its options and its position in the data.
impl<D> Deref for DataLoader<D> {
    type Target = LoaderCore;

    fn deref(&self) -> &LoaderCore {
        &self.core
    }
}

/// A second handle of the same data and of the same position: an epoch that one of them begins is the other's
/// as well. Options that are set afterwards are its own.
impl<D> Clone for DataLoader<D> {
    fn clone(&self) -> Self {
        Self {
            dataset: Arc::clone(&self.dataset),
            order: self.order.clone(),
            core: self.core.clone(),
            upcoming: Arc::clone(&self.upcoming),
        }
    }
}

impl<D: BatchedDataset> DataLoader<D> {
    /// The same loader for one rank of `world`. The batches of all ranks hold every sample; what
    /// is needed to keep them in step is added as duplicates, which [`Batch::valid`] leaves out.
    ///
    /// The seed must be the same on all ranks: give one, or take rank 0's from
    /// [`options`](LoaderCore::options) before the first epoch.
    ///
    /// # Errors
    /// When the rank does not exist or the options do not fit the batch size or each other.
    pub fn shard(mut self, rank: usize, world: usize, options: ShardOptions) -> Result<Self> {
        self.core.position = ShardPosition::of_rank(rank, world, options)?;
        self.check()?;
        Ok(self)
    }

    /// The same loader for a process that reads for all of `world` ranks: each batch holds a round,
    /// the batches of all ranks one after another, and [`Batch::part`] gives a rank its own.
    ///
    /// # Errors
    /// As [`shard`](Self::shard).
    pub fn dispatch(mut self, world: usize, options: ShardOptions) -> Result<Self> {
        self.core.position = ShardPosition { rank: None, world, options };
        self.check()?;
        Ok(self)
    }

    /// Options that can never work are refused at once, before an order is made.
    fn check(&self) -> Result<()> {
        let batch_size = match &self.order {
            OrderRule::Lists(lists) => lists.batch_size(),
            _ => Some(self.core.options.batch_size),
        };
        let options = self.core.position.options;
        match batch_size {
            Some(batch_size) => {
                Shards::new(Order::Sequential(0), batch_size, self.core.position.world, options)?
            }
            None => Shards::from_batches(Vec::new(), None, self.core.position.world, options)?,
        };
        Ok(())
    }

    /// Number of batches that the next epoch gives to this rank: exact, whatever the options.
    /// 0 when the options do not work, which the iteration then says.
    #[must_use]
    pub fn len(&self) -> usize {
        // The order's content does not change the count, and a shuffle costs time.
        let offset = self.core.progress.offset();
        let shards = match &self.order {
            OrderRule::Plain => {
                self.deal(Order::Sequential(self.dataset.num_samples().saturating_sub(offset)))
            }
            OrderRule::Sampler(sampler) => {
                self.deal(Order::Sequential(sampler.len().saturating_sub(offset)))
            }
            OrderRule::Lists(_) => self.plan_after(self.core.progress.epoch(), offset),
        };
        shards.map_or(0, |shards| self.batches_here(&shards))
    }

    /// Whether the next epoch has no batch for this rank.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The plan of an epoch for all ranks.
    ///
    /// # Errors
    /// When the options do not fit together.
    pub fn plan(&self, epoch: u64) -> Result<Shards> {
        self.plan_after(epoch, 0)
    }

    /// The plan of what is left of an epoch after `offset` samples.
    fn plan_after(&self, epoch: u64, offset: usize) -> Result<Shards> {
        let rest = |order: Vec<usize>| order.get(offset..).unwrap_or_default().to_vec().into();
        match &self.order {
            OrderRule::Plain if self.core.options.shuffle => {
                let order =
                    Shuffle::new(self.dataset.num_samples(), self.current_seed()).order(epoch);
                self.deal(rest(order))
            }
            OrderRule::Plain if offset == 0 => {
                self.deal(Order::Sequential(self.dataset.num_samples()))
            }
            OrderRule::Plain => self.deal(rest((0..self.dataset.num_samples()).collect())),
            OrderRule::Sampler(sampler) => self.deal(rest(sampler.order(epoch))),
            OrderRule::Lists(lists) => {
                let rules = self.rules();
                // Whole batches: they were made with a reason.
                let mut left = offset;
                let mut batches = lists.batches(epoch);
                batches.retain(|batch| {
                    let done = batch.len() <= left;
                    left = if done { left - batch.len() } else { 0 };
                    !done
                });
                Ok(Shards::from_batches(
                    batches,
                    lists.batch_size(),
                    self.core.position.world,
                    rules,
                )?)
            }
        }
    }

    fn deal(&self, order: Order) -> Result<Shards> {
        let rules = self.rules();
        Ok(Shards::new(order, self.core.options.batch_size, self.core.position.world, rules)?)
    }

    fn rules(&self) -> ShardOptions {
        let rules = self.core.position.rules(self.core.options.drop_last);
        match self.core.position.world {
            1 => rules,
            _ => self.core.progress.overriding(rules),
        }
    }

    /// Overrides whether ranks get equally many, equally large batches, from the next epoch on; `None`
    /// goes back to the options of [`DataLoader::shard`]. Nothing changes for a loader that is not
    /// shared out.
    pub fn override_even_batches(&self, even: Option<bool>) {
        self.core.progress.override_even(even);
    }

    fn batches_here(&self, shards: &Shards) -> usize {
        self.core.position.rank.map_or_else(|| shards.rounds(), |rank| shards.num_batches(rank))
    }
}

impl<D: BatchedDataset + 'static> DataLoader<D> {
    /// Begins the next epoch. With threads, they start now.
    #[must_use]
    pub fn iter(&self) -> Epoch<D::Batch> {
        let Start { epoch, offset, skip } = self.core.progress.begin();
        let begun = match self.take_upcoming(epoch) {
            Some(batches) if (offset, skip) == (0, 0) => Ok(batches),
            _ => self.plan_after(epoch, offset).and_then(|shards| self.begin(epoch, skip, shards)),
        };
        match begun {
            Ok(mut batches) => {
                if self.core.options.overlap_epochs && self.core.options.threads > 0 {
                    let loader = self.clone();
                    batches.before_last = Some(Box::new(move || loader.begin_early(epoch + 1)));
                }
                let remaining = batches.end - batches.next;
                Epoch::new(epoch, Some(remaining), Box::new(batches))
            }
            Err(error) => Epoch::failed(epoch, error),
        }
    }

    fn upcoming_key(&self, epoch: u64) -> UpcomingKey {
        UpcomingKey {
            epoch,
            seed: self.current_seed(),
            rules: self.rules(),
            options: self.core.options,
            position: self.core.position,
        }
    }

    /// Starts the threads of an epoch. What stops that is said when the epoch is asked for.
    fn begin_early(&self, epoch: u64) {
        let begun = self.plan_after(epoch, 0).and_then(|shards| self.begin(epoch, 0, shards));
        let begun = begun
            .ok()
            .map(|batches| (self.upcoming_key(epoch), Box::new(batches) as Box<dyn Any + Send>));
        *self.upcoming.lock() = begun;
    }

    /// Takes the epoch that threads have begun, if it is this one; another one's threads are stopped.
    fn take_upcoming(&self, epoch: u64) -> Option<MapBatches<D::Batch>> {
        let upcoming = self.upcoming.lock().take();
        let (key, batches) = upcoming?;
        let batches = batches.downcast().ok().map(|batches| *batches);
        batches.filter(|_| key == self.upcoming_key(epoch))
    }

    fn begin(&self, epoch: u64, skip: usize, shards: Shards) -> Result<MapBatches<D::Batch>> {
        let end = self.batches_here(&shards);
        let next = skip.min(end);
        let shards = Arc::new(shards);
        let (dataset, rank, seed) =
            (Arc::clone(&self.dataset), self.core.position.rank, self.current_seed());
        let plan = Arc::clone(&shards);
        let work: Work<D::Batch> = Arc::new(move |batch| {
            let context = BatchContext { seed, epoch, batch, rank: rank.unwrap_or_default() };
            dataset.batch(&indices(&plan, rank, batch), &context)
        });
        let maker = match self.core.options.threads {
            0 => Maker::Caller(work),
            threads => {
                let (ahead, device) = (self.core.options.ahead(), self.core.options.device);
                Maker::Threads(Workers::start(threads, ahead, next..end, device, &work)?)
            }
        };
        Ok(MapBatches { maker, shards, rank, epoch, next, end, before_last: None })
    }
}

/// The samples of a rank's batch, or of a round.
fn indices(shards: &Shards, rank: Option<usize>, batch: usize) -> Vec<usize> {
    let ranks = rank.map_or_else(|| 0..shards.world(), |rank| rank..rank + 1);
    ranks.filter_map(|rank| shards.batch(rank, batch)).flat_map(|batch| batch.indices).collect()
}

/// One epoch of a [`DataLoader`].
struct MapBatches<T> {
    maker: Maker<T>,
    shards: Arc<Shards>,
    rank: Option<usize>,
    epoch: u64,
    next: usize,
    end: usize,
    /// Called before the last batch is given out. Never set in an epoch that waits in the loader, whose
    /// threads it would keep alive.
    before_last: Option<Box<dyn FnOnce() + Send>>,
}

enum Maker<T> {
    Caller(Work<T>),
    Threads(Workers<T>),
}

impl<T: TensorTree + Send + 'static> Iterator for MapBatches<T> {
    type Item = Result<Batch<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.end {
            return None;
        }
        let index = self.next;
        self.next += 1;
        let data = match &mut self.maker {
            Maker::Caller(work) => guarded(|| work(index)),
            Maker::Threads(workers) => workers.next()?.and_then(taken_over),
        };
        let last = self.next == self.end;
        if let Some(begin_next) = self.before_last.take_if(|_| last) {
            begin_next();
        }
        let round = self.shards.round(index);
        Some(match data {
            Ok(data) => Ok(Batch::from_parts(data, index, last, self.rank, round)),
            Err(cause) => Err(at_batch(self.epoch, index, cause)),
        })
    }
}

fn taken_over<T: TensorTree>((data, computed): (T, Option<StreamEvent>)) -> Result<T> {
    take_over(&data, computed.as_ref())?;
    Ok(data)
}

pub(crate) fn at_batch(epoch: u64, batch: usize, cause: Error) -> Error {
    DataError::AtBatch { epoch, batch, cause }.into()
}

impl<D: BatchedDataset + 'static> IntoIterator for &DataLoader<D> {
    type Item = Result<Batch<D::Batch>>;
    type IntoIter = Epoch<D::Batch>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<D> fmt::Debug for DataLoader<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader").field("core", &self.core).finish_non_exhaustive()
    }
}
