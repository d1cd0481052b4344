//! Losses of micro-batches and of steps.

use brigade_torch::{Error, ProcessGroup, ReduceOp, Result};
use tch::{Device, Kind, Tensor};

use crate::loss_weight::LossWeight;

/// The result of a loss closure of [`crate::Pipeline::forward_backward`] for a micro-batch: either a tensor, the mean
/// over the micro-batch's rows; or a sum and its weight, such as the number of tokens. The loss of the batch is then
/// the sum over all micro-batches, divided by the total weight.
pub trait PipelineLoss {
    /// `true` if the loss is a sum with a weight.
    const IS_SUM: bool;

    /// Returns the loss, a tensor of one element, and the weight if it is a sum.
    fn parts(self) -> (Tensor, Option<LossWeight>);
}

impl PipelineLoss for Tensor {
    const IS_SUM: bool = false;

    fn parts(self) -> (Tensor, Option<LossWeight>) {
        (self, None)
    }
}

impl<W: Into<LossWeight>> PipelineLoss for (Tensor, W) {
    const IS_SUM: bool = true;

    fn parts(self) -> (Tensor, Option<LossWeight>) {
        (self.0, Some(self.1.into()))
    }
}

/// The loss of a whole batch, known on every rank of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLoss {
    value: f64,
    weight: f64,
}

impl StepLoss {
    pub(crate) fn of(value: f64, weight: f64) -> Self {
        Self { value, weight }
    }

    /// Returns the mean loss of the batch.
    #[must_use]
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Returns the weight of the batch: the sum of its micro-batches' weights, or its number of rows.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.weight
    }
}

/// The losses of a step's micro-batches, on the rank of the last stage.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Sums, each with its weight.
    sums: Vec<(Tensor, Tensor)>,
    /// Divisor of losses that are sums, until the total weight is known.
    divisor: Option<f64>,
}

impl Losses {
    /// Adds a micro-batch's loss, and returns the initial gradient of its backward. `rows` is the number of its rows,
    /// `all` that of the batch. All ranks of `common` take the same divisor, if there is such a group.
    pub(super) fn add(
        &mut self,
        loss: impl PipelineLoss,
        rows: usize,
        all: usize,
        micro_batches: usize,
        common: Option<&ProcessGroup>,
    ) -> Result<(Tensor, f64)> {
        let (loss, weight) = loss.parts();
        if loss.numel() != 1 {
            return Err(Error::invalid_argument(format!(
                "the loss of a micro-batch has the shape {:?}: return one number, such as a mean",
                loss.size()
            )));
        }
        let value = loss.f_detach()?.f_reshape([0i64; 0])?.f_to_kind(Kind::Double)?;
        let Some(weight) = weight else {
            let weight = Tensor::from(rows as f64);
            self.sums.push((value.f_mul_scalar(rows as f64)?, weight));
            return Ok((loss, rows as f64 / all as f64));
        };
        let weight = weight.checked()?;
        let divisor = match self.divisor {
            Some(divisor) => divisor,
            None => {
                // Gradients have approximately their final magnitude before they are corrected, which fp16 needs.
                let first = weight.f_double_value(&[])?;
                let first = if first >= 1.0 { first } else { 1.0 };
                let first = common.map_or(Ok(first), |group| mean_over_ranks(group, first))?;
                let divisor = first * micro_batches as f64;
                self.divisor = Some(divisor);
                divisor
            }
        };
        self.sums.push((value, weight));
        Ok((loss, 1.0 / divisor))
    }

    /// Returns the mean loss, the total weight, and the divisor of losses that are sums, 1 for means.
    pub(super) fn total(&self) -> Result<[f64; 3]> {
        let (mut sum, mut weight) = (0.0, 0.0);
        for (value, of_micro) in &self.sums {
            sum += value.f_double_value(&[])?;
            weight += of_micro.f_to_device(Device::Cpu)?.f_double_value(&[])?;
        }
        if weight.is_nan() || weight.is_infinite() {
            return Err(Error::invalid_argument(
                "the weight of a micro-batch was negative, NaN, infinite, or a tensor of several elements; expected the \
                 number of tokens that its loss is the sum of",
            ));
        }
        let mean = if weight == 0.0 { 0.0 } else { sum / weight };
        Ok([mean, weight, self.divisor.unwrap_or(1.0)])
    }
}

/// Returns the mean of a number over the ranks of a group, the same on all of them.
fn mean_over_ranks(group: &ProcessGroup, number: f64) -> Result<f64> {
    let mut sum = Tensor::from_slice(&[number]).f_to_device(group.device())?;
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum.f_to_device(Device::Cpu)?.f_double_value(&[0])? / group.size() as f64)
}

impl From<[f64; 3]> for StepLoss {
    fn from([value, weight, _]: [f64; 3]) -> Self {
        Self { value, weight }
    }
}
