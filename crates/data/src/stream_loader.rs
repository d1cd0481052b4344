//! The loader for streams: data without a known length.

use std::fmt;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use brigade_sampling::{Round, ShardOptions, StreamBatch, StreamShard};
use brigade_torch::{Result, StreamEvent, TensorTree};
use crossbeam_channel::{Receiver, bounded};
use tch::Device;

use crate::beside::{Beside, take_over};
use crate::dataset::SampleStream;
use crate::loader::at_batch;
use crate::options::{LoaderCore, ShardPosition, Start, loader_options};
use crate::workers::guarded;
use crate::{Batch, Collate, DataError, Epoch, IterableDataset, LoaderOptions};

/// Iterates over the batches of a stream, epoch after epoch.
///
/// One thread reads and collates ahead of the training step. With several ranks, each reads the whole stream and keeps
/// its part of every round; with [`dispatch`](StreamLoader::dispatch), one rank reads for all instead.
///
/// A sample that cannot be read, or a panic of the stream, is returned as an error in place of its batch and ends the
/// epoch, because the rounds of later samples would differ from those of the other ranks.
///
/// ```
/// use brigade_data::{StreamLoader, stream_from_fn};
///
/// let numbers = stream_from_fn(|_epoch, _seed| (0..1000).map(|number| Ok(number as f32)));
/// let mut sum = 0.0;
/// for batch in &StreamLoader::new(numbers).batch_size(32) {
///     // A tensor [32], the last one [8].
///     sum += batch?.into_data().sum(tch::Kind::Double).double_value(&[]);
/// }
/// assert_eq!(sum, 499_500.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct StreamLoader<I> {
    dataset: Arc<I>,
    core: LoaderCore,
}

impl<I: IterableDataset> StreamLoader<I> {
    /// Creates a loader of batches of one sample, with two batches prefetched.
    pub fn new(dataset: I) -> Self {
        let options =
            LoaderOptions { threads: 1, prefetch: Some(2), ..LoaderOptions::with_drawn_seed() };
        Self { dataset: Arc::new(dataset), core: LoaderCore::new(options) }
    }
}

impl<I> StreamLoader<I> {
    loader_options!();

    /// Sets the number of batches that the reading thread makes ahead. With 0, no thread is started: the calling thread
    /// reads when a batch is requested. One more batch is always read, to detect the last. Defaults to 2.
    #[must_use]
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.core.options.prefetch = Some(batches);
        self.core.options.threads = usize::from(batches > 0);
        self
    }

    /// Returns the dataset.
    #[must_use]
    pub fn dataset(&self) -> &I {
        &self.dataset
    }

    /// Shards the loader: it returns the batches of one rank of `world`, by the rules of [`StreamShard`].
    ///
    /// # Errors
    /// Fails if the rank is not below the world size, or the options do not fit the batch size or a stream.
    pub fn shard(mut self, rank: usize, world: usize, options: ShardOptions) -> Result<Self> {
        self.core.position = ShardPosition::of_rank(rank, world, options)?;
        StreamShard::<()>::new(self.core.options.batch_size, rank, world, options)?;
        Ok(self)
    }

    /// Makes this loader read for all of `world` ranks: each batch holds a round, the batches of all ranks
    /// concatenated, and [`Batch::part`] returns the part of one rank.
    ///
    /// # Errors
    /// Returns the same errors as [`shard`](Self::shard).
    pub fn dispatch(mut self, world: usize, options: ShardOptions) -> Result<Self> {
        StreamShard::<()>::new(self.core.options.batch_size, 0, world, options)?;
        self.core.position = ShardPosition { rank: None, world, options };
        Ok(self)
    }

    fn reader<S: Collate>(&self, epoch: u64, skip: usize) -> Result<Plan> {
        let rules = self.core.position.rules(self.core.options.drop_last);
        let (batch_size, world) = (self.core.options.batch_size, self.core.position.world);
        // Checked here, where the caller gets the error; the reading thread creates its own shard.
        StreamShard::<Rc<S>>::new(
            batch_size,
            self.core.position.rank.unwrap_or_default(),
            world,
            rules,
        )?;
        Ok(Plan { batch_size, world, rank: self.core.position.rank, rules, epoch, skip })
    }
}

/// Gives access to the loader's options and its position in the data.
impl<I> Deref for StreamLoader<I> {
    type Target = LoaderCore;

    fn deref(&self) -> &LoaderCore {
        &self.core
    }
}

impl<I: IterableDataset + 'static> StreamLoader<I> {
    /// Begins the next epoch. The thread starts to read at once.
    #[must_use]
    pub fn iter(&self) -> Epoch<<I::Sample as Collate>::Batch> {
        let Start { epoch, offset, skip } = self.core.progress.begin();
        let (dataset, seed) = (Arc::clone(&self.dataset), self.current_seed());
        // An error among the skipped samples is returned in place of the next sample, so that it is not lost.
        let open = move || -> SampleStream<I::Sample> {
            let mut left = offset;
            Box::new(dataset.iter(epoch, seed).filter(move |sample| {
                let leave_out = left > 0 && sample.is_ok();
                left -= usize::from(leave_out);
                !leave_out
            }))
        };
        let begun = self.reader::<I::Sample>(epoch, skip).and_then(|plan| {
            match (self.core.options.threads, self.core.options.prefetch) {
                (0, _) | (_, Some(0)) => Ok(Epoch::new(
                    epoch,
                    None,
                    Box::new(StreamBatches::new(plan, open, Arc::default())),
                )),
                (_, ahead) => {
                    let ahead = ahead.unwrap_or(2);
                    let reader = Reader::start(plan, ahead, self.core.options.device, open)?;
                    Ok(Epoch::new(epoch, None, Box::new(reader)))
                }
            }
        });
        begun.unwrap_or_else(|error| Epoch::failed(epoch, error))
    }
}

impl<I: IterableDataset + 'static> IntoIterator for &StreamLoader<I> {
    type Item = Result<Batch<<I::Sample as Collate>::Batch>>;
    type IntoIter = Epoch<<I::Sample as Collate>::Batch>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<I> fmt::Debug for StreamLoader<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamLoader").field("core", &self.core).finish_non_exhaustive()
    }
}

/// Position and sharding of one epoch of a stream.
#[derive(Clone, Copy)]
struct Plan {
    batch_size: usize,
    world: usize,
    rank: Option<usize>,
    rules: ShardOptions,
    epoch: u64,
    skip: usize,
}

impl Plan {
    fn shard<S>(&self) -> Result<StreamShard<Rc<S>>> {
        let Some(rank) = self.rank else {
            // A round of all ranks is planned as the batch of a single rank: same samples, same completion.
            let size = self.rows().saturating_mul(self.world);
            let rules = ShardOptions { split_batches: false, ..self.rules };
            return Ok(StreamShard::new(size, 0, 1, rules)?);
        };
        Ok(StreamShard::new(self.batch_size, rank, self.world, self.rules)?)
    }

    /// Returns the number of rows of one rank in a full round.
    fn rows(&self) -> usize {
        if self.rules.split_batches { self.batch_size / self.world } else { self.batch_size }
    }

    /// Returns the sizes of all ranks' batches in a round, given the round that the shard reported.
    fn round(&self, round: Round) -> Round {
        if self.rank.is_some() {
            return round;
        }
        let deal = |total: usize| {
            let part = |rank| total.saturating_sub(rank * self.rows()).min(self.rows());
            (0..self.world).map(part).collect()
        };
        Round { rows: deal(round.rows.iter().sum()), valid: deal(round.total_valid()) }
    }
}

/// The batches of one epoch of a stream, read in the thread that calls `next`.
///
/// Samples are in an `Rc` because those of the first round may be needed again at the end, and a sample (a tensor, for
/// example) cannot always be cloned.
struct StreamBatches<S, O> {
    plan: Plan,
    stop: Arc<AtomicBool>,
    open: Option<O>,
    samples: Option<SampleStream<S>>,
    shard: Option<StreamShard<Rc<S>>>,
    /// The next batch or error, read ahead to detect the last batch.
    held: Option<Result<StreamBatch<Rc<S>>>>,
    index: usize,
}

impl<S: Collate, O: FnOnce() -> SampleStream<S>> StreamBatches<S, O> {
    fn new(plan: Plan, open: O, stop: Arc<AtomicBool>) -> Self {
        Self { plan, stop, open: Some(open), samples: None, shard: None, held: None, index: 0 }
    }

    /// Returns the next batch of the stream; `None` at its end and after an error.
    fn read(&mut self) -> Option<Result<StreamBatch<Rc<S>>>> {
        let result = guarded(|| self.read_unguarded()).transpose();
        if !matches!(result, Some(Ok(_))) {
            (self.samples, self.shard) = (None, None);
        }
        result
    }

    fn read_unguarded(&mut self) -> Result<Option<StreamBatch<Rc<S>>>> {
        if let Some(open) = self.open.take() {
            self.samples = Some(open());
            self.shard = Some(self.plan.shard()?);
        }
        let (Some(samples), Some(shard)) = (&mut self.samples, &mut self.shard) else {
            return Ok(None);
        };
        for sample in samples {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            if let Some(batch) = shard.push(Rc::new(sample?)) {
                return Ok(Some(batch));
            }
        }
        self.samples = None;
        Ok(self.shard.take().and_then(StreamShard::finish))
    }

    fn collate(&self, batch: StreamBatch<Rc<S>>, last: bool) -> Result<Batch<S::Batch>> {
        let items: Vec<&S> = batch.items.iter().map(Rc::as_ref).collect();
        let data = guarded(|| S::collate(&items))?;
        Ok(Batch::from_parts(data, self.index, last, self.plan.rank, self.plan.round(batch.round)))
    }
}

impl<S: Collate, O: FnOnce() -> SampleStream<S>> Iterator for StreamBatches<S, O> {
    type Item = Result<Batch<S::Batch>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let current = match self.held.take() {
                Some(batch) => Some(batch),
                None => self.read(),
            };
            let batch = match current? {
                Ok(batch) => batch,
                Err(cause) => return Some(Err(at_batch(self.plan.epoch, self.index, cause))),
            };
            self.held = self.read();
            let result = (self.index >= self.plan.skip)
                .then(|| self.collate(batch, self.held.is_none()))
                .map(|result| result.map_err(|cause| at_batch(self.plan.epoch, self.index, cause)));
            self.index += 1;
            if matches!(result, Some(Err(_))) {
                (self.samples, self.shard, self.held) = (None, None, None);
            }
            if result.is_some() {
                return result;
            }
        }
    }
}

/// A batch, and the event of the reading thread's GPU stream after which its values are complete.
type Read<T> = Result<(Batch<T>, Option<StreamEvent>)>;

/// The batches of one epoch of a stream, read by a thread.
struct Reader<T> {
    batches: Option<Receiver<Read<T>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Reader<T> {
    fn start<S, O>(plan: Plan, ahead: usize, device: Option<Device>, open: O) -> Result<Self>
    where
        S: Collate<Batch = T> + 'static,
        O: FnOnce() -> SampleStream<S> + Send + 'static,
    {
        // The thread holds one more batch while it waits for room in the channel.
        let (sender, batches) = bounded(ahead.saturating_sub(1));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let beside = Beside::new(device)?;
        let thread = thread::Builder::new()
            .name("brigade-data-stream".into())
            .spawn(move || {
                let mut batches = StreamBatches::new(plan, open, stopped);
                // When this is dropped, it waits for its kernels, before the data that they read are dropped.
                let mut stream = beside.enter();
                for batch in &mut batches {
                    if sender.send(stream.run(|| batch)).is_err() {
                        return;
                    }
                }
            })
            .map_err(|cause| DataError::Spawn { thread: 1, threads: 1, cause })?;
        Ok(Self { batches: Some(batches), stop, thread: Some(thread) })
    }
}

impl<T: TensorTree> Iterator for Reader<T> {
    type Item = Result<Batch<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let (batch, computed) = match self.batches.as_ref()?.recv().ok()? {
            Ok(read) => read,
            Err(error) => return Some(Err(error)),
        };
        Some(take_over(&*batch, computed.as_ref()).map(|()| batch))
    }
}

impl<T> Drop for Reader<T> {
    /// Wakes the thread if it waits for room in the channel, and joins it. A sample that is being read is read to its
    /// end.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // Its panics were returned as errors.
            let _ = thread.join();
        }
    }
}
