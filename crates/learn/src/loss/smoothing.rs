//! fastai's cross-entropy with smoothed labels.

use brigade_torch::{Error, Result};
use tch::{Reduction, Tensor};

use super::cross_entropy::entropy;
use super::weights::Weights;
use super::{Loss, Outputs, read};

/// Cross-entropy with smoothed labels: `eps/classes · Σₖ -ln pₖ + (1 - eps) · -wᵧ ln pᵧ`, with probabilities `p` and
/// the target's class `y`.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`. Class weights apply only to the second term, whose mean is then the
/// weighted mean, as in fastai. Without weights the loss equals PyTorch's with `label_smoothing`.
///
/// ```
/// use brigade_learn::loss::{LabelSmoothingCrossEntropy, Loss, Outputs};
///
/// let loss = LabelSmoothingCrossEntropy::default(); // eps 0.1
/// assert_eq!(loss, LabelSmoothingCrossEntropy::new(0.1));
/// assert_eq!(loss.outputs(), Outputs::Classes);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LabelSmoothingCrossEntropy {
    eps: f64,
    weight: Weights,
}

impl Default for LabelSmoothingCrossEntropy {
    fn default() -> Self {
        Self::new(0.1)
    }
}

impl LabelSmoothingCrossEntropy {
    /// Makes the loss with smoothing `eps`, 0 to 1: the share of a target that is spread evenly over all classes.
    #[must_use]
    pub fn new(eps: f64) -> Self {
        Self { eps, weight: Weights::default() }
    }

    /// Sets a weight for each class in the second term. Defaults to 1 for each.
    #[must_use]
    pub fn weight(mut self, weight: &[f64]) -> Self {
        self.weight = Weights::new(weight);
        self
    }
}

impl Loss for LabelSmoothingCrossEntropy {
    fn name(&self) -> &str {
        "label_smoothing_cross_entropy"
    }

    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        if !(0.0..=1.0).contains(&self.eps) {
            let reason = format!("label smoothing of {}; it lies from 0 to 1", self.eps);
            return Err(Error::invalid_argument(reason));
        }
        let (scores, targets) =
            read::classes("label-smoothing cross-entropy", predictions, targets)?;
        if !self.weight.is_some() {
            return entropy(&scores, &targets, &self.weight, reduce, self.eps);
        }
        let own = entropy(&scores, &targets, &self.weight, reduce, 0.0)?;
        let all = entropy(&scores, &targets, &Weights::default(), reduce, 1.0)?;
        Ok(all.f_mul_scalar(self.eps)?.f_add(&own.f_mul_scalar(1.0 - self.eps)?)?)
    }

    fn outputs(&self) -> Outputs {
        Outputs::Classes
    }
}
