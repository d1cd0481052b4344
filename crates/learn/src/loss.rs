//! Losses: the minimised function, and the decoding of the model's output.
//!
//! Scores of classes are in dimension 1, `[n, classes, …]`, with targets `[n, …]` of class numbers, as PyTorch's losses
//! have them; [`ClassesLast`](brigade_metrics::ClassesLast) reads those with the classes in the last dimension. A
//! loss is computed in `f32` of predictions in half precision.

mod bce;
mod cross_entropy;
mod dice;
mod focal;
mod function;
mod read;
mod regression;
mod smoothing;
mod weights;

use std::fmt;
use std::sync::Arc;

use brigade_metrics::Mse;
use brigade_torch::{Error, Result};
use tch::{Kind, Reduction, Tensor};

pub use bce::BceWithLogits;
pub use cross_entropy::CrossEntropy;
pub use dice::DiceLoss;
pub use focal::Focal;
pub use function::{LossFn, loss_from};
pub use regression::L1;
pub use smoothing::LabelSmoothingCrossEntropy;

/// A loss function, with its activation and its decoding of outputs (fastai's `…LossFlat`).
///
/// ```
/// use brigade_learn::loss::{CrossEntropy, Loss};
/// use tch::{Device, Kind, Tensor};
///
/// let scores = Tensor::zeros([4, 10], (Kind::Float, Device::Cpu));
/// let targets = Tensor::zeros([4], (Kind::Int64, Device::Cpu));
/// let loss = CrossEntropy::default().forward(&scores, &targets)?;
/// assert!((loss.double_value(&[]) - 10f64.ln()).abs() < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait Loss: fmt::Debug + Send + Sync {
    /// Returns the name of the loss.
    fn name(&self) -> &str;

    /// Computes the loss with a reduction, with its autograd graph: with [`Reduction::Mean`] the mean over the batch, a
    /// scalar; with [`Reduction::None`] the loss of each element, in the order of the targets.
    ///
    /// # Errors
    /// Fails when the shapes of predictions and targets do not fit. The message contains both.
    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor>;

    /// Returns what the model's outputs are for this loss, by which they are activated and decoded.
    fn outputs(&self) -> Outputs;

    /// Computes the mean loss over the batch: a scalar tensor with its autograd graph.
    ///
    /// # Errors
    /// Returns the same errors as [`Loss::reduced`].
    fn forward(&self, predictions: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.reduced(predictions, targets, Reduction::Mean)
    }

    /// Computes the loss of each element without reduction, as a tensor of one dimension, in the order of the targets.
    /// Class targets have one value for each sample, pixel or token; other targets have one for each label or number.
    ///
    /// # Errors
    /// Returns the same errors as [`Loss::reduced`].
    fn each(&self, predictions: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Ok(self.reduced(predictions, targets, Reduction::None)?.f_reshape([-1])?)
    }

    /// Converts the model's outputs to probabilities or numbers: by softmax, sigmoid, or the identity.
    ///
    /// # Errors
    /// Fails when the shape does not fit.
    fn activation(&self, predictions: &Tensor) -> Result<Tensor> {
        match self.outputs() {
            Outputs::Classes => read::softmax(predictions),
            Outputs::Labels { .. } => Ok(read::full(predictions)?.f_sigmoid()?),
            Outputs::Numbers => Ok(predictions.shallow_clone()),
        }
    }

    /// Decodes the model's outputs (before the activation): the class with the largest score, the labels whose
    /// probability is above the threshold, or the number itself.
    ///
    /// # Errors
    /// Fails when the shape does not fit.
    fn decode(&self, predictions: &Tensor) -> Result<Tensor> {
        match self.outputs() {
            Outputs::Labels { .. } => self.decode_activated(&self.activation(predictions)?),
            // The softmax keeps the order of the scores.
            Outputs::Classes | Outputs::Numbers => self.decode_activated(predictions),
        }
    }

    /// Decodes outputs to which the activation was already applied, such as the mean of the probabilities of several
    /// passes.
    ///
    /// # Errors
    /// Fails when the shape does not fit.
    fn decode_activated(&self, activated: &Tensor) -> Result<Tensor> {
        Ok(match self.outputs() {
            Outputs::Classes => activated.f_argmax(1, false)?,
            Outputs::Labels { threshold } => activated.f_gt(threshold)?,
            Outputs::Numbers => activated.shallow_clone(),
        })
    }
}

/// Meaning of a model's outputs for a [`Loss`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Outputs {
    /// Scores of classes in dimension 1 (logits). Targets are class numbers, so a mixture of two samples has the
    /// mixture of their losses, not of their targets (fastai's `y_int`).
    Classes,
    /// Logits of independent labels.
    Labels {
        /// Probability above which a label is predicted.
        threshold: f64,
    },
    /// Numbers, which are not converted.
    Numbers,
}

/// Reduces the losses of elements.
fn apply_reduction(each: &Tensor, reduction: Reduction) -> Result<Tensor> {
    match reduction {
        Reduction::None => Ok(each.shallow_clone()),
        Reduction::Mean => Ok(each.f_mean(None::<Kind>)?),
        Reduction::Sum => Ok(each.f_sum(None::<Kind>)?),
        Reduction::Other(_) => Err(Error::invalid_argument(format!(
            "a loss has no {reduction:?}: pass Reduction::None, Mean or Sum"
        ))),
    }
}

/// Makes the loss with this name, with its defaults except for the threshold, to interpret outputs in predictions.
pub(crate) fn loss_named(name: &str, threshold: Option<f64>) -> Option<Arc<dyn Loss>> {
    let known: [Arc<dyn Loss>; 7] = [
        Arc::new(CrossEntropy::default()),
        Arc::new(LabelSmoothingCrossEntropy::default()),
        Arc::new(Focal::default()),
        Arc::new(DiceLoss::default()),
        Arc::new(Mse),
        Arc::new(L1),
        Arc::new(BceWithLogits::default().threshold(threshold.unwrap_or(0.5))),
    ];
    known.into_iter().find(|loss| loss.name() == name)
}
