//! Metrics over all samples of all ranks.

use crate::error::TrainError;
use brigade_data::Batch;
use brigade_metrics::{Metric, MetricState};
use brigade_torch::Result;
use tch::Tensor;

use super::Accelerator;

impl Accelerator {
    /// Adds this rank's part of a batch to a metric, without the duplicates that complete uneven batches, so that every
    /// sample counts once on any number of ranks. Sends nothing.
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_metrics::{Mae, MetricState};
    /// use brigade_train::Accelerator;
    /// use tch::Tensor;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let data = TensorDataset::new(Tensor::from_slice(&[1.0, 2.0, 3.0])).unwrap();
    /// let loader = accelerator.prepare(DataLoader::new(data).batch_size(2))?;
    /// let mut error = MetricState::new(Mae);
    /// for batch in &loader {
    ///     let batch = batch?;
    ///     accelerator.update_metric(&mut error, &batch, &(&*batch + 0.5), &batch)?;
    /// }
    /// assert_eq!(accelerator.compute_metric(&error)?, 0.5);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::TrainError::Rows`] for a tensor without one row per sample of the batch;
    /// [`brigade_metrics::MetricError`] when the metric cannot take the batch.
    pub fn update_metric<M: Metric, B>(
        &self,
        metric: &mut MetricState<M>,
        batch: &Batch<B>,
        predictions: &Tensor,
        targets: &Tensor,
    ) -> Result<()> {
        let (rows, valid) = (batch.rows(), batch.valid() as i64);
        let real = |tensor: &Tensor| -> Result<Tensor> {
            if tensor.size().first().copied() != Some(rows as i64) {
                return Err(TrainError::Rows { expected: rows, found: tensor.size() }.into());
            }
            Ok(tensor.f_narrow(0, 0, valid)?)
        };
        let (predictions, targets) = (real(predictions)?, real(targets)?);
        if valid == 0 {
            return Ok(());
        }
        metric.update_at(batch.index(), &predictions, &targets)
    }

    /// Computes a metric's value over all ranks, the same on each. The state itself stays this rank's, and can be
    /// updated further. Every rank calls it.
    ///
    /// # Errors
    /// [`brigade_metrics::MetricError`], on every rank, when the ranks have different metrics, or the value is not
    /// defined for these data; [`brigade_torch::ErrorKind::Communication`] when another rank is gone.
    #[track_caller]
    pub fn compute_metric<M: Metric>(&self, metric: &MetricState<M>) -> Result<M::Value> {
        metric.compute(self.data_processes().traced().as_ref())
    }
}
