//! The cross-entropy of classes.

use brigade_metrics::IGNORED;
use brigade_torch::Result;
use tch::{Reduction, Tensor};

use super::weights::Weights;
use super::{Loss, Outputs, read};

/// Cross-entropy of logits: `-wᵧ ln softmax(prediction)ᵧ` of the target's class `y`, as PyTorch computes it.
///
/// Predictions `[n, classes, …]`, targets `[n, …]` of class numbers. Targets with the value [`IGNORED`] are left out.
/// With weights, the mean is the sum of the weighted losses divided by the sum of the weights. A target that is not a
/// class number is an error on the CPU. On a GPU there is no check, because it would synchronize with the device in
/// each step: a device-side assertion of CUDA aborts the process.
///
/// ```
/// use brigade_learn::loss::{CrossEntropy, Loss};
/// use tch::Tensor;
///
/// let loss = CrossEntropy::default().weight(&[1.0, 3.0]).label_smoothing(0.1);
/// let scores = Tensor::from_slice2(&[[2.0, 0.5], [0.0, 1.0]]);
/// let value = loss.forward(&scores, &Tensor::from_slice(&[0i64, 1]))?;
/// assert_eq!(value.size(), [0; 0]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CrossEntropy {
    weight: Weights,
    label_smoothing: f64,
}

impl CrossEntropy {
    /// Sets a weight for each class. Defaults to 1 for each.
    #[must_use]
    pub fn weight(mut self, weight: &[f64]) -> Self {
        self.weight = Weights::new(weight);
        self
    }

    /// Sets label smoothing: a target becomes `1 - eps` of its class plus `eps` spread evenly over all classes.
    /// Defaults to 0. With class weights this is PyTorch's smoothing, which weighs both parts; fastai's is
    /// [`LabelSmoothingCrossEntropy`](super::LabelSmoothingCrossEntropy).
    #[must_use]
    pub fn label_smoothing(mut self, eps: f64) -> Self {
        self.label_smoothing = eps;
        self
    }
}

/// Returns libtorch's cross-entropy of scores and targets that fit.
pub(super) fn entropy(
    scores: &Tensor,
    targets: &Tensor,
    weight: &Weights,
    reduction: Reduction,
    label_smoothing: f64,
) -> Result<Tensor> {
    let weight =
        weight.beside("cross-entropy", scores.size()[1], (scores.kind(), scores.device()))?;
    Ok(scores.f_cross_entropy_loss(targets, weight, reduction, IGNORED, label_smoothing)?)
}

impl Loss for CrossEntropy {
    fn name(&self) -> &str {
        "cross_entropy"
    }

    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        let (scores, targets) = read::classes("cross-entropy", predictions, targets)?;
        entropy(&scores, &targets, &self.weight, reduce, self.label_smoothing)
    }

    fn outputs(&self) -> Outputs {
        Outputs::Classes
    }
}
