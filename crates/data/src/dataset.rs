//! Data that is read sample by sample: of known length, and as a stream.

use std::fmt;

use brigade_rank_env::text::counted;
use brigade_torch::Result;

use crate::{BatchContext, BatchedDataset, Collate, DataError};

/// Data of known length that is read sample by sample.
///
/// This is torch's map-style `Dataset`: a length and a sample by index. A [`DataLoader`](crate::DataLoader) collates
/// the samples of a batch, in its threads. For data that is read faster as whole batches, implement [`BatchedDataset`];
/// every `Dataset` is one too.
///
/// ```
/// use brigade_data::{DataLoader, Dataset};
/// use brigade_torch::Result;
///
/// struct Squares;
///
/// impl Dataset for Squares {
///     type Sample = (f32, f32);
///
///     fn len(&self) -> usize {
///         1000
///     }
///
///     fn get(&self, index: usize, _seed: u64) -> Result<Self::Sample> {
///         Ok((index as f32, (index * index) as f32))
///     }
/// }
///
/// for batch in &DataLoader::new(Squares).batch_size(32).shuffle(true) {
///     let (x, y) = batch?.into_data(); // two tensors, [32] each, the last ones [8]
///     assert_eq!(&x * &x, y);
/// }
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait Dataset: Send + Sync {
    /// Type of a sample.
    type Sample: Collate;

    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Returns `true` if there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the sample `index`. Random choices must depend only on `seed`, which is new in every epoch and the same
    /// on any number of threads and ranks.
    ///
    /// # Errors
    /// Fails with any error of the dataset, which the loader returns in place of the sample's batch.
    fn get(&self, index: usize, seed: u64) -> Result<Self::Sample>;
}

/// A list of samples in memory as a dataset.
///
/// It is a separate type because [`Dataset::get`] on `Vec` would hide the slice's `get` wherever the trait is in scope.
///
/// ```
/// use brigade_data::{DataLoader, VecDataset};
///
/// let loader = DataLoader::new(VecDataset(vec![(1.0f32, 0i64), (2.0, 1)])).batch_size(2);
/// assert_eq!(loader.len(), 1);
/// ```
#[derive(Clone, Debug)]
pub struct VecDataset<T>(pub Vec<T>);

impl<T: Collate + Clone + Send + Sync> Dataset for VecDataset<T> {
    type Sample = T;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize, _: u64) -> Result<T> {
        self.0.get(index).cloned().ok_or(DataError::Index { index, len: self.0.len() }.into())
    }
}

/// Allows datasets of several types to be one type: `Box<dyn Dataset<Sample = S>>`.
impl<D: Dataset + ?Sized> Dataset for Box<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize, seed: u64) -> Result<Self::Sample> {
        (**self).get(index, seed)
    }
}

/// Creates a dataset of `len` samples that are read by a function of the index and a seed.
///
/// ```
/// use brigade_data::{DataLoader, dataset_from_fn};
///
/// let loader = DataLoader::new(dataset_from_fn(10, |index, _seed| Ok([index as f32, 1.0])));
/// ```
pub fn dataset_from_fn<F, S>(len: usize, f: F) -> DatasetFromFn<F>
where
    F: Fn(usize, u64) -> Result<S> + Send + Sync,
    S: Collate,
{
    DatasetFromFn { len, f }
}

/// A dataset whose samples are read by a function of the index. Made by [`dataset_from_fn`].
#[derive(Clone)]
pub struct DatasetFromFn<F> {
    len: usize,
    f: F,
}

impl<F, S> Dataset for DatasetFromFn<F>
where
    F: Fn(usize, u64) -> Result<S> + Send + Sync,
    S: Collate,
{
    type Sample = S;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize, seed: u64) -> Result<S> {
        (self.f)(index, seed)
    }
}

/// Reads the samples of a batch one after another, and collates them.
impl<D: Dataset> BatchedDataset for D {
    type Batch = <D::Sample as Collate>::Batch;

    fn num_samples(&self) -> usize {
        self.len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let samples: Vec<D::Sample> = indices
            .iter()
            .map(|&index| self.get(index, context.sample_seed(index)))
            .collect::<Result<_, _>>()?;
        Collate::collate(&samples.iter().collect::<Vec<_>>())
    }
}

/// Data without a known length or without access by index: a stream that is read from its start in each epoch.
/// [`StreamLoader`](crate::StreamLoader) makes batches of it.
///
/// Each rank reads the whole stream and keeps its part, so that the stream must return the same samples in the same
/// order on every rank.
pub trait IterableDataset: Send + Sync {
    /// Type of a sample.
    type Sample: Collate + 'static;

    /// Returns an iterator over the samples of an epoch. Random choices in their order or content must depend only on
    /// `epoch` and `seed`, which are the same on all ranks.
    fn iter(&self, epoch: u64, seed: u64) -> SampleStream<Self::Sample>;
}

/// Iterator over the samples of one epoch of a stream.
pub type SampleStream<S> = Box<dyn Iterator<Item = Result<S>> + Send>;

/// Creates a stream that is opened by a function of the epoch and the seed.
///
/// ```
/// use brigade_data::{StreamLoader, stream_from_fn};
///
/// let lines = stream_from_fn(|_epoch, _seed| (0..1000).map(|number| Ok(number as f32)));
/// let loader = StreamLoader::new(lines).batch_size(16);
/// ```
pub fn stream_from_fn<F, I, S>(f: F) -> StreamFromFn<F>
where
    F: Fn(u64, u64) -> I + Send + Sync,
    I: Iterator<Item = Result<S>> + Send + 'static,
    S: Collate + 'static,
{
    StreamFromFn(f)
}

/// A stream that is opened by a function. Made by [`stream_from_fn`].
#[derive(Clone)]
pub struct StreamFromFn<F>(F);

impl<F, I, S> IterableDataset for StreamFromFn<F>
where
    F: Fn(u64, u64) -> I + Send + Sync,
    I: Iterator<Item = Result<S>> + Send + 'static,
    S: Collate + 'static,
{
    type Sample = S;

    fn iter(&self, epoch: u64, seed: u64) -> SampleStream<S> {
        Box::new((self.0)(epoch, seed))
    }
}

impl<F> fmt::Debug for DatasetFromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatasetFromFn({})", counted(self.len, "sample"))
    }
}

impl<F> fmt::Debug for StreamFromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamFromFn")
    }
}

#[cfg(test)]
mod tests {
    use brigade_torch::elements;

    use super::*;

    #[test]
    fn boxes_of_datasets_are_batched() {
        let numbers = dataset_from_fn(4, |index, _| Ok(index as f32));
        let all: [Box<dyn Dataset<Sample = f32>>; 2] =
            [Box::new(numbers), Box::new(VecDataset(vec![0.0, 1.0, 2.0, 3.0]))];
        for dataset in all {
            assert_eq!((dataset.len(), dataset.num_samples(), dataset.is_empty()), (4, 4, false));
            let batch = dataset.batch(&[3, 1], &BatchContext::default()).unwrap();
            assert_eq!(elements::<f32>(&batch).unwrap().to_vec(), [3.0, 1.0]);
        }
        let error = VecDataset(vec![1.0f32]).get(1, 0).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(DataError::Index { index: 1, len: 1 })));
    }
}
