//! The mean of values that a program has computed.

use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::{Fold, Folded, Metric, MetricState, read};

/// Weighted mean of values, such as losses weighted by their rows or tokens.
///
/// Values are passed as predictions and their weights as targets, in the same shape.
///
/// ```
/// use brigade_metrics::{Mean, MetricState};
/// use tch::Tensor;
///
/// let mut loss = MetricState::new(Mean);
/// loss.update(&Tensor::from_slice(&[2.0, 5.0]), &Tensor::from_slice(&[1.0, 2.0]))?;
/// loss.add(0.0, 1.0)?;
/// assert_eq!(loss.compute(None)?, 3.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mean;

impl Metric for Mean {
    type Value = f64;

    fn name(&self) -> String {
        "mean".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let (values, weights) = read::numeric("mean", predictions, targets)?;
        Fold::sums(&[values.f_mul(&weights)?.f_sum(Kind::Double)?, weights.f_sum(Kind::Double)?])
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let [sum, weight] = read::numbers("mean", folded)?;
        Ok(sum / weight)
    }
}

impl MetricState<Mean> {
    /// Adds one value with its weight.
    ///
    /// # Errors
    /// Returns an error of libtorch.
    pub fn add(&mut self, value: f64, weight: f64) -> Result<()> {
        self.update(&Tensor::from(value), &Tensor::from(weight))
    }
}
