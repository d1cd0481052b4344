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

/// Iterates over the batches of a dataset, epoch after epoch.
///
/// Each iteration is one epoch. The order is determined by the seed and the epoch number, so that it can be repeated,
/// and ranks with the same seed have the same order without communication. The number of threads affects the time at
/// which batches are made, never their content.
///
/// A batch that cannot be made is returned as an error in its place, and the iteration continues after it; a panic of
/// the dataset is such an error. Dropping an iteration stops its threads.
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

/// The [`MapBatches`] of an epoch that threads have begun before it was requested, and the key that it was made with.
type Upcoming = Option<(UpcomingKey, Box<dyn Any + Send>)>;

/// Everything besides the dataset that determines the batches of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UpcomingKey {
    epoch: u64,
    seed: u64,
    rules: ShardOptions,
    options: LoaderOptions,
    position: ShardPosition,
}

/// Batch sampler: returns the batches of an epoch as lists of indices, like torch's `BatchSampler`.
///
/// It must return the same batches on all ranks.
pub trait BatchSampler: fmt::Debug + Send + Sync {
    /// Returns the batches of epoch `epoch` as lists of sample indices.
    fn batches(&self, epoch: u64) -> Vec<Vec<usize>>;

    /// Returns the size of all batches but the last. `None` if sizes vary: sharding then distributes whole batches.
    /// Defaults to `None`.
    fn batch_size(&self) -> Option<usize> {
        None
    }
}

#[derive(Clone)]
enum OrderRule {
    /// The order of the options: that of the dataset, or shuffled.
    Plain,
    Sampler(Arc<dyn Sampler>),
    Lists(Arc<dyn BatchSampler>),
}

impl<D: BatchedDataset> DataLoader<D> {
    /// Creates a loader of a [`Dataset`](crate::Dataset) or a [`BatchedDataset`]. By default it returns batches of one
    /// sample, in the dataset's order, made in the calling thread; the methods below change that.
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

    /// Sets whether threads begin the next epoch when the last batch of an epoch is returned, so that its first batches
    /// are ready when validation is over. The batches are the same. Between two epochs, as many batches as are
    /// prefetched stay in memory; they are dropped after the last epoch, or if the seed, the epoch or the position is
    /// set in between. Has no effect without threads. Defaults to `false`.
    ///
    /// A dataset that counts its reads, or that changes between epochs, is read early for the next epoch.
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

    /// Sets whether samples are visited in a random order that is new in each epoch. Defaults to `false`.
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.core.options.shuffle = shuffle;
        self
    }

    /// Sets the number of threads that prefetch batches. With 0, each batch is made in the calling thread when it is
    /// requested. The threads take cores away from the training step. Defaults to 0.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.core.options.threads = threads;
        self
    }

    /// Sets how many batches the threads make ahead, all of which are in memory. Has no effect without threads.
    /// Defaults to two for each thread.
    #[must_use]
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.core.options.prefetch = Some(batches);
        self
    }

    /// Visits the samples in the order of `sampler`, instead of [`shuffle`](Self::shuffle). The sampler has a seed of
    /// its own; with several ranks, it must be the same on all.
    #[must_use]
    pub fn sampler(mut self, sampler: impl Sampler + 'static) -> Self {
        self.order = OrderRule::Sampler(Arc::new(sampler));
        self.upcoming = Arc::default();
        self
    }

    /// Sets the batch sampler, which replaces batch size, order and [`shuffle`](Self::shuffle). Defaults to none.
    #[must_use]
    pub fn batch_sampler(mut self, batches: impl BatchSampler + 'static) -> Self {
        self.order = OrderRule::Lists(Arc::new(batches));
        self.upcoming = Arc::default();
        self
    }

    /// Returns the dataset.
    #[must_use]
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Returns `true` if the order depends on the loader's seed. Unless a seed was set, processes that run the same
    /// program then have different orders, because each draws its own seed.
    #[must_use]
    pub fn depends_on_seed(&self) -> bool {
        matches!(self.order, OrderRule::Plain) && self.core.options.shuffle
    }
}

/// Gives access to the loader's options and its position in the data.
impl<D> Deref for DataLoader<D> {
    type Target = LoaderCore;

    fn deref(&self) -> &LoaderCore {
        &self.core
    }
}

/// Creates a second handle of the same data and the same position: an epoch that one of them begins is also counted by
/// the other. Options that are set afterwards apply to one handle only.
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
    /// Shards the loader: it returns the batches of one rank of `world`. The batches of all ranks together contain
    /// every sample, unless the options drop some; duplicates that keep the ranks in step are not counted by
    /// [`Batch::valid`].
    ///
    /// The seed must be the same on all ranks: set one, or take rank 0's from [`options`](LoaderCore::options) before
    /// the first epoch.
    ///
    /// # Errors
    /// Fails if the rank is not below the world size, or the options do not fit the batch size or each other.
    pub fn shard(mut self, rank: usize, world: usize, options: ShardOptions) -> Result<Self> {
        self.core.position = ShardPosition::of_rank(rank, world, options)?;
        self.check()?;
        Ok(self)
    }

    /// Makes this loader read for all of `world` ranks: each batch holds a round, the batches of all ranks
    /// concatenated, and [`Batch::part`] returns the part of one rank.
    ///
    /// # Errors
    /// Returns the same errors as [`shard`](Self::shard).
    pub fn dispatch(mut self, world: usize, options: ShardOptions) -> Result<Self> {
        self.core.position = ShardPosition { rank: None, world, options };
        self.check()?;
        Ok(self)
    }

    /// Rejects options that can never work, before an order is made.
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

    /// Returns the number of batches that the next epoch has for this rank, exactly, whatever the options. Returns 0 if
    /// the options do not fit together; the iteration then returns the error.
    #[must_use]
    pub fn len(&self) -> usize {
        // The content of the order does not change the count, and a shuffle would cost time.
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

    /// Returns `true` if the next epoch has no batches for this rank.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the plan of an epoch for all ranks.
    ///
    /// # Errors
    /// Fails if the options do not fit together.
    pub fn plan(&self, epoch: u64) -> Result<Shards> {
        self.plan_after(epoch, 0)
    }

    /// Returns the plan of the rest of an epoch after `offset` samples.
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
                // Whole batches are skipped: a batch sampler's batches must not be cut.
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

    /// Overrides, from the next epoch on, whether all ranks get the same number of batches of the same size. `None`
    /// restores the options of [`DataLoader::shard`]. Has no effect on a loader that is not sharded.
    pub fn override_even_batches(&self, even: Option<bool>) {
        self.core.progress.override_even(even);
    }

    fn batches_here(&self, shards: &Shards) -> usize {
        self.core.position.rank.map_or_else(|| shards.rounds(), |rank| shards.num_batches(rank))
    }
}

impl<D: BatchedDataset + 'static> DataLoader<D> {
    /// Begins the next epoch. Threads start at once.
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

    /// Starts the threads of an epoch. An error here is dropped: it occurs again, and is returned, when the epoch is
    /// requested.
    fn begin_early(&self, epoch: u64) {
        let begun = self.plan_after(epoch, 0).and_then(|shards| self.begin(epoch, 0, shards));
        let begun = begun
            .ok()
            .map(|batches| (self.upcoming_key(epoch), Box::new(batches) as Box<dyn Any + Send>));
        *self.upcoming.lock() = begun;
    }

    /// Takes the epoch that threads have begun, if it is the requested one. The threads of another epoch are stopped.
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

/// Returns the sample indices of a rank's batch, or of a whole round if `rank` is `None`.
fn indices(shards: &Shards, rank: Option<usize>, batch: usize) -> Vec<usize> {
    let ranks = rank.map_or_else(|| 0..shards.world(), |rank| rank..rank + 1);
    ranks.filter_map(|rank| shards.batch(rank, batch)).flat_map(|batch| batch.indices).collect()
}

/// The batches of one epoch of a [`DataLoader`].
struct MapBatches<T> {
    maker: Maker<T>,
    shards: Arc<Shards>,
    rank: Option<usize>,
    epoch: u64,
    next: usize,
    end: usize,
    /// Called before the last batch is returned. Never set in an epoch that waits in the loader: the closure holds the
    /// loader, which would keep the epoch's threads alive.
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
