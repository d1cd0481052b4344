//! Losses that are sums over unequal numbers of tokens.
//!
//! A loss is a sum with a number of tokens (`TokenLoss`): means of batches with unequal numbers of tokens do not add
//! up. `backward_weighted` divides by the number of tokens of the window on all ranks. The number is a tensor beside
//! the sum, so a step on a GPU does not wait for it.

use brigade_torch::Result;
use tch::{Kind, Tensor};

/// The weight of a loss among others, usually its number of tokens, for [`crate::Accelerator::backward_weighted`]: a
/// number, or a tensor of one element, whose value the host does not read if it is on a GPU.
#[derive(Debug)]
pub struct LossWeight(Tensor);

impl From<f64> for LossWeight {
    fn from(weight: f64) -> Self {
        Self(Tensor::from(weight))
    }
}

impl From<&Tensor> for LossWeight {
    fn from(weight: &Tensor) -> Self {
        Self(weight.shallow_clone())
    }
}

impl From<Tensor> for LossWeight {
    fn from(weight: Tensor) -> Self {
        Self(weight)
    }
}

impl LossWeight {
    /// Returns the weight as a scalar in double precision. An invalid one is NaN, because the other ranks wait for this
    /// rank's weight.
    pub(crate) fn checked(&self) -> Result<Tensor> {
        if self.0.numel() != 1 {
            return Ok(Tensor::from(f64::NAN));
        }
        let weight = self.0.f_detach()?.f_reshape([0i64; 0])?.f_to_kind(Kind::Double)?;
        Ok(weight.f_where_scalarother(&weight.f_ge(0.0)?, f64::NAN)?)
    }
}

/// Sums of one rank over a window, each a scalar in double precision on the host or on the device.
#[derive(Debug)]
pub(crate) struct WeightedWindow {
    pub(crate) weight: Tensor,
    /// Divisor of the losses so far: the whole weight is not known until the last batch.
    pub(crate) divisor: Tensor,
}
