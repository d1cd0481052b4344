//! Data that is read sample by sample: of known length, and as a stream.

use std::fmt;

use crate::{BatchContext, Collate, DataError, Dataset};

/// Data of known length that is read sample by sample.
///
/// [`Collated`] joins the samples into batches; [`DataLoader::from_samples`] does so itself.
///
/// ```no_run
/// use brigade_data::{DataError, DataLoader, Samples};
///
/// struct Squares;
///
/// impl Samples for Squares {
///     type Sample = (f32, f32);
///
///     fn len(&self) -> usize {
///         1000
///     }
///
///     fn sample(&self, index: usize, _seed: u64) -> Result<Self::Sample, DataError> {
///         Ok((index as f32, (index * index) as f32))
///     }
/// }
///
/// for batch in &DataLoader::from_samples(Squares).batch_size(32).shuffle(true) {
///     let (x, y) = batch?.into_data(); // two tensors, [32] each
/// }
/// # Ok::<(), DataError>(())
/// ```
///
/// [`DataLoader::from_samples`]: crate::DataLoader::from_samples
pub trait Samples: Send + Sync {
    /// What a sample is.
    type Sample: Collate;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample `index`. What is random in it must follow from `seed`, which is new in every
    /// epoch and the same on any number of threads and ranks.
    ///
    /// # Errors
    /// The loader delivers them at the sample's batch.
    fn sample(&self, index: usize, seed: u64) -> Result<Self::Sample, DataError>;
}

/// A list of samples is a dataset in memory.
impl<T: Collate + Clone + Send + Sync> Samples for Vec<T> {
    type Sample = T;

    fn len(&self) -> usize {
        self.len()
    }

    fn sample(&self, index: usize, _: u64) -> Result<T, DataError> {
        self.get(index).cloned().ok_or(DataError::Index { index, len: self.len() })
    }
}

/// A dataset of `len` samples that a function of the index and a seed reads.
///
/// ```no_run
/// use brigade_data::{DataLoader, samples_from_fn};
///
/// let loader = DataLoader::from_samples(samples_from_fn(10, |index, _seed| Ok([index as f32, 1.0])));
/// ```
pub fn samples_from_fn<F, S>(len: usize, f: F) -> SamplesFromFn<F>
where
    F: Fn(usize, u64) -> Result<S, DataError> + Send + Sync,
    S: Collate,
{
    SamplesFromFn { len, f }
}

/// Samples that a function reads; see [`samples_from_fn`].
#[derive(Clone)]
pub struct SamplesFromFn<F> {
    len: usize,
    f: F,
}

impl<F, S> Samples for SamplesFromFn<F>
where
    F: Fn(usize, u64) -> Result<S, DataError> + Send + Sync,
    S: Collate,
{
    type Sample = S;

    fn len(&self) -> usize {
        self.len
    }

    fn sample(&self, index: usize, seed: u64) -> Result<S, DataError> {
        (self.f)(index, seed)
    }
}

/// The dataset whose batches are these samples, collated.
#[derive(Clone, Debug)]
pub struct Collated<S>(pub S);

impl<S: Samples> Dataset for Collated<S> {
    type Batch = <S::Sample as Collate>::Batch;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch, DataError> {
        let samples: Vec<S::Sample> = indices
            .iter()
            .map(|&index| self.0.sample(index, context.sample_seed(index)))
            .collect::<Result<_, _>>()?;
        Collate::collate(&samples.iter().collect::<Vec<_>>())
    }
}

/// Data without a length or without access by index: a stream that is read from its start in each
/// epoch. [`StreamLoader`](crate::StreamLoader) makes batches of it.
///
/// Several ranks each read the whole stream and keep their part, so every rank must see the same
/// samples in the same order.
pub trait IterableDataset: Send + Sync {
    /// What a sample is.
    type Sample: Collate + 'static;

    /// The samples of an epoch. What is random in their order or content must follow from `epoch`
    /// and `seed`, which all ranks share.
    fn iter(&self, epoch: u64, seed: u64) -> SampleStream<Self::Sample>;
}

/// The samples of one epoch.
pub type SampleStream<S> = Box<dyn Iterator<Item = Result<S, DataError>> + Send>;

/// A stream that a function of the epoch and the seed opens.
///
/// ```no_run
/// use brigade_data::{StreamLoader, stream_from_fn};
///
/// let lines = stream_from_fn(|_epoch, _seed| (0..1000).map(|number| Ok(number as f32)));
/// let loader = StreamLoader::new(lines).batch_size(16);
/// ```
pub fn stream_from_fn<F, I, S>(f: F) -> StreamFromFn<F>
where
    F: Fn(u64, u64) -> I + Send + Sync,
    I: Iterator<Item = Result<S, DataError>> + Send + 'static,
    S: Collate + 'static,
{
    StreamFromFn(f)
}

/// A stream that a function opens; see [`stream_from_fn`].
#[derive(Clone)]
pub struct StreamFromFn<F>(F);

impl<F, I, S> IterableDataset for StreamFromFn<F>
where
    F: Fn(u64, u64) -> I + Send + Sync,
    I: Iterator<Item = Result<S, DataError>> + Send + 'static,
    S: Collate + 'static,
{
    type Sample = S;

    fn iter(&self, epoch: u64, seed: u64) -> SampleStream<S> {
        Box::new((self.0)(epoch, seed))
    }
}

impl<F> fmt::Debug for SamplesFromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SamplesFromFn({} samples)", self.len)
    }
}

impl<F> fmt::Debug for StreamFromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamFromFn")
    }
}
