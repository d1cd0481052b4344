//! Data sets on a rank's device, if they fit into its memory.
//!
//! Each rank decides for itself, by free memory (`Processes::place_dataset`). A `TensorDataset` on a GPU gathers rows
//! by indices that are sent through pinned memory. Its order and the parts of ranks are those of the loader, so the
//! values do not depend on where the data are.

use brigade_data::TensorDataset;
use brigade_torch::{DeviceExt, DeviceMemory, Error, Result, TensorTree};
use tch::Device;

use crate::processes::Processes;

/// Maximum share of a GPU's free memory that [`Processes::place_dataset`] uses for a data set.
pub const DATASET_SHARE: f64 = 0.5;

impl Processes {
    /// Moves a data set to this rank's device if it needs at most half of the device's free memory ([`DATASET_SHARE`]),
    /// and leaves it on the host otherwise. Its [`device`](TensorDataset::device) and a log line show the result. Each
    /// rank decides for itself: batches hold the same values either way.
    ///
    /// Call it when model and optimizer are on the device, since they count as memory in use. The other half of the
    /// free memory is for activations, whose size is not known here.
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_train::Accelerator;
    /// use tch::Tensor;
    ///
    /// let accelerator = Accelerator::builder().quiet(true).build()?;
    /// let data = TensorDataset::new(Tensor::from_slice(&[1f32, 2., 3., 4.]))?;
    /// let data = accelerator.processes().place_dataset(data)?;
    /// assert_eq!(data.device(), accelerator.device());
    /// let loader = accelerator.prepare(DataLoader::new(data).batch_size(2).shuffle(true))?;
    /// # assert_eq!(loader.len(), 2);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when the device cannot report its free memory or has failed.
    pub fn place_dataset<T>(&self, dataset: TensorDataset<T>) -> Result<TensorDataset<T>>
    where
        T: TensorTree<Owned = T> + Send + 'static,
    {
        self.place_dataset_within(dataset, DATASET_SHARE)
    }

    /// Moves a data set to this rank's device as [`Processes::place_dataset`] does, with another share of the free
    /// memory, 0 to 1.
    ///
    /// # Errors
    /// Returns the same errors as [`Processes::place_dataset`], and [`brigade_torch::ErrorKind::InvalidArgument`] for a
    /// share outside of 0 to 1.
    pub fn place_dataset_within<T>(
        &self,
        dataset: TensorDataset<T>,
        share: f64,
    ) -> Result<TensorDataset<T>>
    where
        T: TensorTree<Owned = T> + Send + 'static,
    {
        place(self, dataset, share)
    }
}

/// Moves a data set to the rank's device if it takes at most `share` of the free memory.
fn place<T>(
    processes: &Processes,
    dataset: TensorDataset<T>,
    share: f64,
) -> Result<TensorDataset<T>>
where
    T: TensorTree<Owned = T> + Send + 'static,
{
    if !(0.0..=1.0).contains(&share) {
        return Err(Error::invalid_argument(format!(
            "place_dataset_within: a share of the free memory is 0 to 1, found {share}"
        )));
    }
    let device = processes.device();
    let (rank, label) = (processes.process_index(), device.label());
    // Other devices do not report their free memory.
    if !device.has_streams() || dataset.device() == device {
        return Ok(dataset);
    }
    let (bytes, free) = (dataset.bytes(), free_memory(device)?);
    if bytes as f64 > share * free as f64 {
        tracing::info!(
            "rank {rank}: the data set of {bytes} bytes stays on the host: {label} has {free} bytes free, of which \
             it may take {share}"
        );
        return Ok(dataset);
    }
    match dataset.to_device(device) {
        Ok(placed) => {
            // The copy reads host memory that is freed when this function returns.
            device.synchronize()?;
            tracing::info!("rank {rank}: the data set of {bytes} bytes lies on {label}");
            Ok(placed)
        }
        // The free memory is fragmented, or another process has taken it meanwhile.
        Err(error) if error.is_out_of_memory() => {
            tracing::info!(
                "rank {rank}: the data set of {bytes} bytes stays on the host: {label} had {free} bytes free, and \
                 then not as much: {}",
                error.to_string().lines().next().unwrap_or_default()
            );
            Ok(dataset)
        }
        Err(error) => Err(error),
    }
}

/// Returns the free memory in bytes: what the driver has, and what libtorch's allocator keeps for reuse.
fn free_memory(device: Device) -> Result<u64> {
    let Some((kind, index)) = device.device_kind() else { return Ok(0) };
    // The allocator returns an error before the first computation on the device.
    let kept = DeviceMemory::of(device).ok().flatten().map_or(0, |memory| {
        let DeviceMemory { allocated, reserved, .. } = memory;
        reserved.saturating_sub(allocated)
    });
    Ok(kind.memory(index)?.free + kept)
}
