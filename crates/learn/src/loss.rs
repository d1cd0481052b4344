//! Losses: what is minimised, and how the model's output is read.

use std::fmt;

use tch::Tensor;

use crate::error::Result;

/// A loss function, with the activation and the decision that belong to it (fastai's `…LossFlat`).
pub trait Loss: fmt::Debug + Send + Sync {
    /// Returns its name.
    fn name(&self) -> &str;

    /// Computes the mean over the batch: a tensor of one value with a graph.
    ///
    /// # Errors
    /// When shapes do not fit: an error that names both.
    fn forward(&self, predictions: &Tensor, targets: &Tensor) -> Result<Tensor>;

    /// Computes the loss of each element without reduction, in the shape that PyTorch's `reduction="none"` has
    /// after fastai's flattening: for classes `[n]`, or `[n, …]` of sequences and images flattened to one value
    /// for each token or pixel.
    ///
    /// # Errors
    /// As [`Loss::forward`].
    fn each(&self, predictions: &Tensor, targets: &Tensor) -> Result<Tensor>;

    /// Turns outputs into probabilities or numbers: softmax, sigmoid, or nothing.
    ///
    /// # Errors
    /// When the shape does not fit.
    fn activation(&self, predictions: &Tensor) -> Result<Tensor>;

    /// Decides: the class with the largest score, the labels above a threshold, or the number itself.
    ///
    /// # Errors
    /// When the shape does not fit.
    fn decode(&self, predictions: &Tensor) -> Result<Tensor>;

    /// Whether targets are class numbers: then a mixture of two samples is a mixture of their losses, not of
    /// their targets (fastai's `y_int`).
    fn targets_are_classes(&self) -> bool;
}
