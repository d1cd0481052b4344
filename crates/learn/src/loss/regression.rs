//! Losses of numbers.

use brigade_metrics::{ClassesLast, Mse};
use brigade_torch::Result;
use tch::{Reduction, Tensor};

use super::{Loss, Outputs, read};

/// Mean absolute error, `mean(|prediction - target|)`. Predictions and targets have the same shape, or the shapes
/// `[n, 1]` and `[n]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct L1;

macro_rules! of_numbers {
    ($($name:ident $label:literal $what:literal $kernel:ident)+) => {
        $(impl Loss for $name {
            fn name(&self) -> &str {
                $label
            }

            fn reduced(
                &self,
                predictions: &Tensor,
                targets: &Tensor,
                reduce: Reduction,
            ) -> Result<Tensor> {
                let (predictions, targets) = read::numbers($what, predictions, targets)?;
                Ok(predictions.$kernel(&targets, reduce)?)
            }

            fn outputs(&self) -> Outputs {
                Outputs::Numbers
            }
        })+
    };
}

of_numbers! {
    Mse "mse" "mean squared error" f_mse_loss
    L1 "l1" "L1 loss" f_l1_loss
}

impl<L: Loss> Loss for ClassesLast<L> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        self.0.reduced(&Self::first(predictions)?, targets, reduce)
    }

    fn outputs(&self) -> Outputs {
        self.0.outputs()
    }

    fn activation(&self, predictions: &Tensor) -> Result<Tensor> {
        let probabilities = self.0.activation(&Self::first(predictions)?)?;
        Ok(probabilities.f_movedim_int(1, -1)?)
    }

    fn decode(&self, predictions: &Tensor) -> Result<Tensor> {
        self.0.decode(&Self::first(predictions)?)
    }
}
