//! Operations of the ranks, under the Accelerator's names.

use brigade_data::Batch;
use brigade_torch::{Result, TensorTree};
use tch::Device;

use super::Accelerator;
use crate::processes::Processes;

impl Accelerator {
    /// Returns the ranks, for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn processes(&self) -> &Processes {
        &self.processes
    }

    /// Returns the data-parallel ranks: this one and those that read other samples. These are all ranks, unless some
    /// divide layers or sequences between them ([`AcceleratorBuilder::mesh`](crate::AcceleratorBuilder::mesh)): the
    /// ranks of a tensor or context group read the same samples. Sums and means over samples are taken over these
    /// ranks.
    ///
    /// ```
    /// use brigade_train::Accelerator;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// assert_eq!(accelerator.data_processes().num_processes(), accelerator.processes().num_processes());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn data_processes(&self) -> &Processes {
        &self.data
    }

    /// Gathers values computed from a batch as [`Processes::gather`] does, without the duplicates that complete uneven
    /// batches: over an epoch, every sample counts exactly once.
    ///
    /// # Errors
    /// Returns the same errors as [`Processes::gather_for_metrics`].
    #[track_caller]
    pub fn gather_for_metrics<B, T: TensorTree>(
        &self,
        batch: &Batch<B>,
        values: &T,
    ) -> Result<T::Owned> {
        self.data_processes().gather_for_metrics(batch, values)
    }

    /// Returns `true` on rank 0.
    #[must_use]
    pub fn is_main_process(&self) -> bool {
        self.processes.is_main_process()
    }

    /// Returns the device of this process, on which models and batches are placed.
    #[must_use]
    pub fn device(&self) -> Device {
        self.processes.device()
    }
}
