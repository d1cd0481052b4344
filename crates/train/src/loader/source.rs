//! Loaders that can be distributed over the ranks.

use std::ops::Deref;

use brigade_data::{
    BatchedDataset, Collate, DataLoader, Epoch, IterableDataset, LoaderCore, LoaderOptions,
    StreamLoader,
};
use brigade_sampling::ShardOptions;
use brigade_torch::{Result, TensorTree, elements};
use tch::{Device, Tensor};

use crate::error::TrainError;
use crate::processes::Processes;

/// Options of the distribution of batches over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataLoaderConfiguration {
    /// `true` if a loader's batch size is that of all ranks together, so that each takes its part of every batch.
    /// Defaults to `false`.
    pub split_batches: bool,
    /// `true` if all ranks get the same number of equally large batches, completed with duplicates that metrics leave
    /// out. Defaults to `true`.
    pub even_batches: bool,
    /// `true` if rank 0 reads the data and sends every rank its part. Defaults to `false`.
    pub dispatch_batches: bool,
}

impl Default for DataLoaderConfiguration {
    fn default() -> Self {
        Self { split_batches: false, even_batches: true, dispatch_batches: false }
    }
}

/// A loader that [`PreparedLoader`](crate::PreparedLoader) can distribute over the ranks: a [`DataLoader`] or a
/// [`StreamLoader`]. The trait has the methods in which these differ; the others are those of their [`LoaderCore`].
pub trait Loader: Deref<Target = LoaderCore> + Send + Sync {
    /// Type of the data of a batch.
    type Data: TensorTree<Owned = Self::Data> + Send + 'static;

    /// Returns the number of samples. `None` for a stream, which has no length.
    fn num_samples(&self) -> Option<usize>;

    /// Sets the seed on which the ranks have agreed, and the device of the loader's threads.
    #[must_use]
    fn agreed(self, seed: u64, device: Device) -> Self
    where
        Self: Sized;

    /// Restricts the loader to the batches of one rank; without a rank, the loader reads the batches of all ranks.
    ///
    /// # Errors
    /// Fails when the options do not fit the batch size or each other.
    fn sharded(self, rank: Option<usize>, world: usize, options: ShardOptions) -> Result<Self>
    where
        Self: Sized;

    /// Begins the next epoch.
    fn begin(&self) -> Epoch<Self::Data>;

    /// Overrides whether all ranks get the same number of batches, if the loader supports it.
    fn override_even_batches(&self, _even: Option<bool>) {}
}

/// Implements [`Loader::agreed`] and [`Loader::sharded`] with the options of the same names, which both loaders have.
macro_rules! share {
    () => {
        fn agreed(self, seed: u64, device: Device) -> Self {
            self.seed(seed).device(device)
        }

        fn sharded(self, rank: Option<usize>, world: usize, options: ShardOptions) -> Result<Self> {
            match rank {
                Some(rank) => self.shard(rank, world, options),
                None => self.dispatch(world, options),
            }
        }
    };
}

impl<D> Loader for DataLoader<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    type Data = D::Batch;

    fn num_samples(&self) -> Option<usize> {
        Some(self.dataset().num_samples())
    }

    share!();

    fn begin(&self) -> Epoch<D::Batch> {
        self.iter()
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

    fn num_samples(&self) -> Option<usize> {
        None
    }

    share!();

    fn begin(&self) -> Epoch<Self::Data> {
        self.iter()
    }
}

/// Restricts a loader to this rank's part of the data. All ranks take part, and agree on the seed of the order.
pub(super) fn share_out<L: Loader>(
    loader: L,
    processes: &Processes,
    configuration: DataLoaderConfiguration,
) -> Result<L> {
    let DataLoaderConfiguration { split_batches, even_batches, dispatch_batches } = configuration;
    let (length, seed) = (loader.num_samples(), loader.options().seed);
    let samples = length.map_or(-1, |samples| samples as i64);
    let (samples, seed) = agree(processes, samples, seed, dispatch_batches)?;
    let device = loader.options().device.unwrap_or_else(|| processes.device());
    let agreed = loader.agreed(seed, device);
    let LoaderOptions { batch_size, drop_last, .. } = *agreed.options();
    // A run without a step is always a mistake. All ranks have the same numbers here, so all fail.
    if length.is_some() && (samples == 0 || (drop_last && samples < batch_size as i64)) {
        return Err(TrainError::NoBatch { samples, batch_size }.into());
    }
    let (rank, world) = (processes.process_index(), processes.num_processes());
    if world == 1 {
        return Ok(agreed);
    }
    let options = ShardOptions { split_batches, even_batches, ..ShardOptions::default() };
    agreed.sharded((!dispatch_batches).then_some(rank), world, options)
}

/// Compares the number of samples across ranks and returns rank 0's seed. In dispatch mode only rank 0's data are read,
/// so others may differ.
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
        return Err(TrainError::LoadersDiffer { rank, expected, found: all[rank].0 }.into());
    }
    Ok((expected, u64::from_ne_bytes(seed.to_ne_bytes())))
}
