//! The binary cross-entropy of labels.

use brigade_torch::Result;
use tch::{Reduction, Tensor};

use super::weights::Weights;
use super::{Loss, Outputs, read};

/// Binary cross-entropy of logits of labels: `-w (v y ln σ(x) + (1 - y) ln(1 - σ(x)))`, with weights `w` of labels and
/// `v` of positive targets.
///
/// Predictions and targets are `[n, labels]`, or have further dimensions before the last. Targets are 0, 1, or between,
/// of any dtype.
///
/// ```
/// use brigade_learn::loss::{BceWithLogits, Loss};
/// use tch::Tensor;
///
/// let loss = BceWithLogits::default().threshold(0.3);
/// let there = loss.decode(&Tensor::from_slice2(&[[-0.5f32, -2.0]]))?; // probabilities 0.38 and 0.12
/// assert_eq!(there, Tensor::from_slice2(&[[true, false]]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct BceWithLogits {
    weight: Weights,
    pos_weight: Weights,
    threshold: f64,
}

impl Default for BceWithLogits {
    fn default() -> Self {
        Self { weight: Weights::default(), pos_weight: Weights::default(), threshold: 0.5 }
    }
}

impl BceWithLogits {
    /// Sets a weight for each label. Defaults to 1 for each.
    #[must_use]
    pub fn weight(mut self, weight: &[f64]) -> Self {
        self.weight = Weights::new(weight);
        self
    }

    /// Sets a weight for the positive targets of each label. Defaults to 1 for each.
    #[must_use]
    pub fn pos_weight(mut self, weight: &[f64]) -> Self {
        self.pos_weight = Weights::new(weight);
        self
    }

    /// Sets the probability above which a label is predicted. Defaults to 0.5.
    #[must_use]
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.threshold = threshold;
        self
    }
}

impl Loss for BceWithLogits {
    fn name(&self) -> &str {
        "bce_with_logits"
    }

    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        let (scores, targets) = read::numbers("binary cross-entropy", predictions, targets)?;
        let labels = scores.size().last().copied().unwrap_or(1);
        let options = (scores.kind(), scores.device());
        let weight = self.weight.beside("binary cross-entropy", labels, options)?;
        let pos_weight = self.pos_weight.beside("binary cross-entropy", labels, options)?;
        Ok(scores.f_binary_cross_entropy_with_logits(&targets, weight, pos_weight, reduce)?)
    }

    fn outputs(&self) -> Outputs {
        Outputs::Labels { threshold: self.threshold }
    }
}
