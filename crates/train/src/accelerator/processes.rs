//! The ranks, and metrics over all of them.

use brigade_data::Batch;
use brigade_torch::{Device, Tensor, TensorTree};

use super::Accelerator;
use crate::error::Result;
use crate::processes::Processes;
use crate::processes::metrics::{self, Metric};

impl Accelerator {
    /// Returns the ranks as a value of their own: for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn processes(&self) -> &Processes {
        &self.processes
    }

    /// As [`Processes::gather`], for what was computed from a batch, without the duplicates that
    /// complete uneven batches: over an epoch, every sample counts exactly once.
    ///
    /// # Errors
    /// As [`Processes::gather_for_metrics`].
    #[track_caller]
    pub fn gather_for_metrics<B, T: TensorTree>(
        &self,
        batch: &Batch<B>,
        values: &T,
    ) -> Result<T::Owned> {
        self.processes.gather_for_metrics(batch, values)
    }

    /// Adds this rank's part of a batch to a metric, without the duplicates that complete uneven batches.
    /// Sends nothing.
    ///
    /// # Errors
    /// [`crate::Error::Rows`] for a tensor without one row per sample of the batch; those of the metric.
    pub fn update_metric<B>(
        &self,
        metric: &mut impl Metric,
        batch: &Batch<B>,
        predictions: &Tensor,
        targets: &Tensor,
    ) -> Result<()> {
        metrics::update(metric, batch, predictions, targets)
    }

    /// Computes a metric's value over all ranks, the same on each. The metric itself stays this rank's, and
    /// can be updated further. Every rank calls it.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`], on every rank, when their states have different lengths; [`crate::Error::Torch`] when a
    /// peer is gone.
    #[track_caller]
    pub fn compute_metric<M: Metric>(&self, metric: &M) -> Result<M::Value> {
        self.processes.compute_metric(metric)
    }

    /// Whether this is rank 0.
    #[must_use]
    pub fn is_main_process(&self) -> bool {
        self.processes.is_main_process()
    }

    /// The device of this process: models and batches are put there.
    #[must_use]
    pub fn device(&self) -> Device {
        self.processes.device()
    }
}
