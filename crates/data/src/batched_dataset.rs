//! Data of known length that is read in whole batches, and the position of a batch.

use std::fmt;
use std::sync::Arc;

use brigade_rank_env::text::counted;
use brigade_sampling::stream;
use brigade_torch::{Result, TensorTree};
use rand_pcg::rand_core::Rng;

/// Data of known length that makes whole batches.
///
/// Suited to data in memory, where a batch is one pass over bytes. If samples are read one by one, implement
/// [`Dataset`](crate::Dataset) instead: it is automatically a `BatchedDataset`.
///
/// A loader calls `batch` from its threads, several at a time and in any order. Random choices must therefore come from
/// the [`BatchContext`], not from a generator in the dataset: then an epoch is the same at any number of threads.
pub trait BatchedDataset: Send + Sync {
    /// Type of a batch: tensors, or tuples, lists and maps of tensors.
    type Batch: TensorTree + Send + 'static;

    /// Returns the number of samples.
    fn num_samples(&self) -> usize;

    /// Makes the batch of the samples `indices`, in this order. An index may occur twice.
    ///
    /// Every tensor of the batch has one row for each index. The call runs concurrently with the training step: a
    /// libtorch operator that is large enough to start a team of threads takes cores from it.
    ///
    /// # Errors
    /// Fails with any error of the dataset, which the loader returns in place of this batch.
    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch>;

    /// Returns the dataset with `f` applied to each batch, in the loader's threads.
    ///
    /// ```
    /// use brigade_data::{BatchedDataset, TensorDataset};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let images = TensorDataset::new(Tensor::zeros([6, 4, 4], (Kind::Float, Device::Cpu)))?;
    /// let flat = images.map(|images, _| Ok(images.f_flatten(1, -1)?));
    /// assert_eq!(flat.batch(&[0, 1], &Default::default())?.size(), [2, 16]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    fn map<F, B>(self, f: F) -> Map<Self, F>
    where
        Self: Sized,
        F: Fn(Self::Batch, &BatchContext) -> Result<B> + Send + Sync,
        B: TensorTree + Send + 'static,
    {
        Map { dataset: self, f }
    }
}

/// Position of a batch, from which the random seeds of its samples are derived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchContext {
    /// Seed of the loader, the same on all ranks.
    pub seed: u64,
    /// Number of the epoch, from 0.
    pub epoch: u64,
    /// Number of the batch in the epoch of its rank, from 0.
    pub batch: usize,
    /// The rank to which this batch belongs.
    pub rank: usize,
}

impl BatchContext {
    /// Returns the seed for random choices in the sample `index`. It depends on the loader's seed, the epoch and the
    /// sample, so that a sample has the same seed at any number of threads and ranks.
    ///
    /// ```
    /// use brigade_data::BatchContext;
    ///
    /// let (one, other) = (BatchContext::default(), BatchContext { rank: 3, ..Default::default() });
    /// assert_eq!(one.sample_seed(7), other.sample_seed(7));
    /// assert_ne!(one.sample_seed(7), BatchContext { epoch: 1, ..one }.sample_seed(7));
    /// ```
    #[must_use]
    pub fn sample_seed(&self, index: usize) -> u64 {
        stream(self.seed, &[SAMPLE, self.epoch, index as u64]).next_u64()
    }

    /// Returns the seed for random choices in the batch as a whole. It depends on the loader's seed, the epoch, the
    /// rank and the batch.
    #[must_use]
    pub fn batch_seed(&self) -> u64 {
        let path = [BATCH, self.epoch, self.rank as u64, self.batch as u64];
        stream(self.seed, &path).next_u64()
    }
}

/// First numbers of the paths of this crate's random streams; `brigade-sampling` uses 1 and 2.
const SAMPLE: u64 = 3;
const BATCH: u64 = 4;

/// A dataset whose batches are changed by a function. Made by [`BatchedDataset::map`].
#[derive(Clone)]
pub struct Map<D, F> {
    dataset: D,
    f: F,
}

impl<D, F, B> BatchedDataset for Map<D, F>
where
    D: BatchedDataset,
    F: Fn(D::Batch, &BatchContext) -> Result<B> + Send + Sync,
    B: TensorTree + Send + 'static,
{
    type Batch = B;

    fn num_samples(&self) -> usize {
        self.dataset.num_samples()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<B> {
        (self.f)(self.dataset.batch(indices, context)?, context)
    }
}

/// Creates a dataset of `len` samples whose batches are made by a function.
///
/// ```
/// use brigade_data::batches_from_fn;
/// use brigade_torch::from_vec;
///
/// let squares = batches_from_fn(100, |indices, _| {
///     let values: Vec<f32> = indices.iter().map(|index| (index * index) as f32).collect();
///     Ok(from_vec(values, &[indices.len() as i64])?)
/// });
/// for batch in &brigade_data::DataLoader::new(squares).batch_size(50) {
///     assert_eq!(batch?.size(), [50]);
/// }
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn batches_from_fn<F, B>(len: usize, f: F) -> BatchesFromFn<F>
where
    F: Fn(&[usize], &BatchContext) -> Result<B> + Send + Sync,
    B: TensorTree + Send + 'static,
{
    BatchesFromFn { len, f }
}

/// A dataset whose batches are made by a function. Made by [`batches_from_fn`].
#[derive(Clone)]
pub struct BatchesFromFn<F> {
    len: usize,
    f: F,
}

impl<F, B> BatchedDataset for BatchesFromFn<F>
where
    F: Fn(&[usize], &BatchContext) -> Result<B> + Send + Sync,
    B: TensorTree + Send + 'static,
{
    type Batch = B;

    fn num_samples(&self) -> usize {
        self.len
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<B> {
        (self.f)(indices, context)
    }
}

/// Allows datasets of several types to be one type: `Arc<dyn BatchedDataset<Batch = B>>`.
impl<D: BatchedDataset + ?Sized> BatchedDataset for Arc<D> {
    type Batch = D::Batch;

    fn num_samples(&self) -> usize {
        (**self).num_samples()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        (**self).batch(indices, context)
    }
}

impl<D: fmt::Debug, F> fmt::Debug for Map<D, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Map").field(&self.dataset).finish()
    }
}

impl<F> fmt::Debug for BatchesFromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BatchesFromFn({})", counted(self.len, "sample"))
    }
}

#[cfg(test)]
mod tests {
    use brigade_torch::{elements, from_vec};

    use super::*;

    #[test]
    fn functions_and_shared_trait_objects_are_datasets() {
        let dataset = batches_from_fn(9, |indices, context| {
            let values: Vec<i64> = indices.iter().map(|index| *index as i64).collect();
            let seed = context.sample_seed(indices[0]) as i64;
            Ok((from_vec(values, &[indices.len() as i64])?, from_vec(vec![seed], &[1])?))
        });
        let shared: Arc<dyn BatchedDataset<Batch = _>> =
            Arc::new(Arc::new(dataset).map(|(x, _), _| Ok(x.f_mul_scalar(2)?)));
        assert_eq!(shared.num_samples(), 9);
        let batch = shared.batch(&[4, 0, 8], &BatchContext::default()).unwrap();
        assert_eq!(elements::<i64>(&batch).unwrap().to_vec(), [8, 0, 16]);
    }

    #[test]
    fn seeds_differ_by_all_that_they_depend_on() {
        let base = BatchContext { seed: 1, epoch: 0, batch: 0, rank: 0 };
        let others = [
            BatchContext { seed: 2, ..base },
            BatchContext { epoch: 1, ..base },
            BatchContext { batch: 1, ..base },
            BatchContext { rank: 1, ..base },
        ];
        for other in others {
            assert_ne!(base.batch_seed(), other.batch_seed(), "{other:?}");
        }
        assert_ne!(base.sample_seed(0), base.sample_seed(1));
        assert_ne!(base.sample_seed(0), base.batch_seed());
    }
}
