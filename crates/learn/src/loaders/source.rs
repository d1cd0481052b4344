//! Loaders with their types erased.

use std::sync::Arc;

use brigade_data::{Batch, BatchContext, BatchedDataset, DataLoader};
use brigade_torch::{Error, Result, TensorTree};
use brigade_train::{Accelerator, DataLoaderConfiguration, PreparedLoader};
use tch::Device;

use super::input::{ModelInput, Parts, Target};

/// Function that splits a loader's batch, on its device, into input and targets.
type Split<B> = Arc<dyn Fn(B) -> Result<Parts> + Send + Sync>;

/// A loader whose type is erased.
pub(crate) trait BatchSource {
    /// Shares the loader among the ranks. A training loader follows the Accelerator's rules, and is saved in its
    /// checkpoints. A validation loader is divided by batches, without duplicates; with sharding each rank has the same
    /// number of batches, the last of which may have duplicates or nothing else.
    fn prepare(&self, accelerator: &Accelerator, training: bool)
    -> Result<Box<dyn PreparedSource>>;
    fn batches(&self) -> usize;
    /// Returns the number of the epoch that begins next.
    fn epoch(&self) -> u64;
    fn set_epoch(&self, epoch: u64);
    /// Returns a handle that yields every sample once, in the order of the data or of its sampler.
    fn in_order(&self) -> Box<dyn BatchSource>;
    /// Returns the indices of the next epoch's samples, in order, if a sampler yields each sample once in another order
    /// than the data's.
    fn places(&self) -> Result<Option<Vec<i64>>>;
    /// Makes a batch of these samples on the CPU, without changing the loader's position.
    fn rows(&self, indices: &[usize]) -> Result<Parts>;
    /// Makes the first rows of the next epoch on the CPU, without changing the loader's position.
    fn sample(&self, rows: usize) -> Result<Parts>;
}

/// A loader that is shared among the ranks.
pub(crate) trait PreparedSource {
    fn begin(&self) -> Box<dyn Iterator<Item = Result<Batch<Parts>>>>;
    fn batches(&self) -> usize;
}

struct Source<D: BatchedDataset> {
    loader: DataLoader<D>,
    split: Split<D::Batch>,
}

struct Prepared<D: BatchedDataset> {
    loader: PreparedLoader<DataLoader<D>>,
    split: Split<D::Batch>,
}

/// Wraps a loader, with a function that splits its batches into input and targets.
pub(crate) fn source<D, X, Y>(
    what: &str,
    loader: DataLoader<D>,
    split: impl Fn(D::Batch) -> Result<(X, Y)> + Send + Sync + 'static,
) -> Result<Box<dyn BatchSource>>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
    X: ModelInput,
    Y: Target,
{
    if loader.dataset().num_samples() == 0 {
        return Err(Error::invalid_argument(format!(
            "the {what} loader has no sample; look at the folder, the filters and the split"
        )));
    }
    let split: Split<D::Batch> = Arc::new(move |batch| {
        let (input, target) = split(batch)?;
        Ok(Parts { inputs: input.into_tensors(), target: target.into_target() })
    });
    Ok(Box::new(Source { loader, split }))
}

impl<D> BatchSource for Source<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    fn prepare(
        &self,
        accelerator: &Accelerator,
        training: bool,
    ) -> Result<Box<dyn PreparedSource>> {
        // A handle of the same loader, whose epochs continue from fit to fit.
        let handle = self.loader.clone();
        let loader = if training {
            accelerator.prepare(handle)?
        } else {
            // Ranks that share a model's parts run the same number of forward passes; duplicates are left out.
            let even_batches = accelerator.parallel().sharding().is_some();
            let whole = DataLoaderConfiguration { even_batches, ..Default::default() };
            PreparedLoader::new(handle, accelerator.data_processes(), whole)?
        };
        Ok(Box::new(Prepared { loader, split: Arc::clone(&self.split) }))
    }

    fn batches(&self) -> usize {
        self.loader.len()
    }

    fn epoch(&self) -> u64 {
        self.loader.epoch()
    }

    fn set_epoch(&self, epoch: u64) {
        self.loader.set_epoch(epoch);
    }

    fn in_order(&self) -> Box<dyn BatchSource> {
        let loader = self.loader.clone().shuffle(false).drop_last(false).overlap_epochs(false);
        Box::new(Self { loader, split: Arc::clone(&self.split) })
    }

    fn places(&self) -> Result<Option<Vec<i64>>> {
        let plan = self.loader.plan(self.loader.epoch())?;
        let order: Vec<usize> = plan.rank(0).flat_map(|batch| batch.indices).collect();
        if order.iter().enumerate().all(|(place, index)| place == *index) {
            return Ok(None);
        }
        let mut places = vec![-1; order.len()];
        for (place, index) in order.into_iter().enumerate() {
            match places.get_mut(index) {
                Some(slot @ -1) => *slot = place as i64,
                // If samples are left out or repeated, there is no such order.
                _ => return Ok(None),
            }
        }
        Ok(Some(places))
    }

    fn sample(&self, rows: usize) -> Result<Parts> {
        let epoch = self.loader.epoch();
        let first = self.loader.plan(epoch)?.batch(0, 0);
        let mut indices = first.map(|batch| batch.indices).unwrap_or_default();
        indices.truncate(rows);
        self.rows(&indices)
    }

    fn rows(&self, indices: &[usize]) -> Result<Parts> {
        let (seed, epoch) = (self.loader.current_seed(), self.loader.epoch());
        let context = BatchContext { seed, epoch, batch: 0, rank: 0 };
        // The data set may be on a GPU.
        let batch = self.loader.dataset().batch(indices, &context)?;
        (self.split)(batch.to_device(Device::Cpu)?)
    }
}

impl<D> PreparedSource for Prepared<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    fn begin(&self) -> Box<dyn Iterator<Item = Result<Batch<Parts>>>> {
        let split = Arc::clone(&self.split);
        Box::new(self.loader.iter().map(move |batch| batch?.try_map(|data| split(data))))
    }

    fn batches(&self) -> usize {
        self.loader.len()
    }
}
