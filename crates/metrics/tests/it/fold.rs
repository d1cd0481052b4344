//! Folds batches and merges them in the order of the data, on any number of pretended ranks.

use brigade_metrics::{Fold, Folded, Metric};
use brigade_torch::Result;
use tch::{Device, Tensor};

/// Returns what a metric keeps of batches of `size`, batch `i` folded by rank `i mod ranks`, merged in the order of
/// the data: sums are added, rows put together.
pub(crate) fn folded(
    metric: &dyn Metric<Value = f64>,
    predictions: &Tensor,
    targets: &Tensor,
    size: i64,
    ranks: usize,
) -> Result<Folded> {
    let rows = predictions.size()[0];
    let starts: Vec<i64> = (0..rows).step_by(size as usize).collect();
    let mut batches: Vec<Option<Fold>> = starts.iter().map(|_| None).collect();
    for rank in 0..ranks {
        for (batch, &start) in starts.iter().enumerate().skip(rank).step_by(ranks) {
            let length = size.min(rows - start);
            let part = |tensor: &Tensor| tensor.narrow(0, start, length);
            batches[batch] = Some(metric.fold(&part(predictions), &part(targets))?);
        }
    }
    let (mut sums, mut parts) = (Vec::<f64>::new(), Vec::new());
    for fold in batches.into_iter().flatten() {
        match fold {
            Fold::Sums(batch) => {
                assert_eq!(batch.dim(), 1);
                let batch = Vec::<f64>::try_from(&batch).unwrap();
                sums.resize(batch.len(), 0.0);
                sums.iter_mut().zip(batch).for_each(|(sum, number)| *sum += number);
            }
            Fold::Rows(predictions, targets) => {
                assert_eq!(predictions.size()[0], targets.size()[0]);
                parts.push((predictions.to_device(Device::Cpu), targets.to_device(Device::Cpu)));
            }
        }
    }
    if parts.is_empty() {
        return Ok(Folded::Sums(sums));
    }
    let (predictions, targets): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    Ok(Folded::Rows(Tensor::cat(&predictions, 0), Tensor::cat(&targets, 0)))
}

/// Returns the metric's value over batches of `size` on `ranks` pretended ranks.
pub(crate) fn value(
    metric: &dyn Metric<Value = f64>,
    predictions: &Tensor,
    targets: &Tensor,
    size: i64,
    ranks: usize,
) -> Result<f64> {
    metric.value(&folded(metric, predictions, targets, size, ranks)?)
}
