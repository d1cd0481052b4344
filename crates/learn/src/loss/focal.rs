//! The focal loss.

use brigade_torch::Result;
use tch::{Reduction, Tensor};

use super::cross_entropy::entropy;
use super::weights::Weights;
use super::{Loss, Outputs, apply_reduction, read};

/// Focal loss (Lin et al., 2017): `(1 - p)^gamma · ce`, with the cross-entropy `ce` and `p = exp(-ce)`, so that
/// well-classified samples have less weight.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`. As in fastai, class weights are part of `ce`, and therefore of `p`,
/// and the mean over the samples is not weighted.
///
/// ```
/// use brigade_learn::loss::Focal;
///
/// let loss = Focal::default(); // gamma 2
/// assert_eq!(loss, Focal::new(2.0));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Focal {
    gamma: f64,
    weight: Weights,
}

impl Default for Focal {
    fn default() -> Self {
        Self::new(2.0)
    }
}

impl Focal {
    /// Makes the loss with a focusing parameter `gamma`. With 0 it is the cross-entropy.
    #[must_use]
    pub fn new(gamma: f64) -> Self {
        Self { gamma, weight: Weights::default() }
    }

    /// Sets a weight for each class. Defaults to 1 for each.
    #[must_use]
    pub fn weight(mut self, weight: &[f64]) -> Self {
        self.weight = Weights::new(weight);
        self
    }
}

impl Loss for Focal {
    fn name(&self) -> &str {
        "focal"
    }

    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        let (scores, targets) = read::classes("focal loss", predictions, targets)?;
        let entropy = entropy(&scores, &targets, &self.weight, Reduction::None, 0.0)?;
        let wrong = entropy.f_neg()?.f_expm1()?.f_neg()?; // 1 - p
        apply_reduction(&wrong.f_pow_tensor_scalar(self.gamma)?.f_mul(&entropy)?, reduce)
    }
    fn outputs(&self) -> Outputs {
        Outputs::Classes
    }
}
