//! The decoder of a language model: logits, and the loss without storing all logits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use brigade_nn::Training;
use brigade_torch::{
    CrossEntropyLoss, CrossEntropyOptions, Result, cross_entropy, linear, linear_cross_entropy,
};
use parking_lot::Mutex;
use tch::Tensor;

/// The decoder of a [`LanguageModel`](crate::LanguageModel): the last layer, which computes logits from hidden states.
/// Clones are handles of the same head, with the model's own parameters, for a loss that is computed outside of the
/// model.
///
/// With a vocabulary of 60,000 tokens, logits, their softmax and its gradient take most of a step's memory. After
/// [`LanguageModelHead::fuse_loss`] the model returns the head's input in training, and [`LanguageModelHead::loss`]
/// computes the loss from it, with a part of the logits at a time.
///
/// ```
/// use brigade_models::{LanguageModel, LanguageModelOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let mut options = LanguageModelOptions::default();
/// (options.encoder.embedding, options.encoder.hidden) = (8, 12);
/// let mut model = Model::new(|path| LanguageModel::new(path, 26, &options))?;
/// let head = model.module().head().clone();
/// head.fuse_loss(true);
/// let words = Tensor::from_slice(&[2i64, 3, 4, 5]).view([2, 2]);
/// let targets = Tensor::from_slice(&[3i64, 4, 5, 6]).view([2, 2]);
/// let output = model.forward(&words)?; // [2, 2, 8]
/// let loss = head.loss(&output, &targets, &Default::default())?.loss;
/// loss.backward();
/// model.eval();
/// assert_eq!(model.forward(&words)?.size(), [2, 2, 26]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LanguageModelHead {
    layer: Arc<Mutex<Layer>>,
    fused: Arc<AtomicBool>,
    training: Training,
}

#[derive(Debug)]
struct Layer {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl LanguageModelHead {
    pub(super) fn new(weight: Tensor, bias: Option<Tensor>, training: Training) -> Self {
        let layer = Arc::new(Mutex::new(Layer { weight, bias }));
        Self { layer, fused: Arc::default(), training }
    }

    /// Sets whether the model returns the head's input `[n, time, embedding]` in training, for
    /// [`LanguageModelHead::loss`], instead of logits. Defaults to `false`.
    ///
    /// With `true` the parameters of the head are used by the loss and not by the forward, so that a reducer must not
    /// search for parameters that the forward does not use.
    pub fn fuse_loss(&self, on: bool) {
        // Relaxed: the flag orders no other memory accesses.
        self.fused.store(on, Ordering::Relaxed);
    }

    /// Returns `true` if the model currently returns the head's input instead of logits: it is in training, and the
    /// loss is fused.
    #[must_use]
    pub fn is_fused(&self) -> bool {
        self.fused.load(Ordering::Relaxed) && self.training.is_on()
    }

    pub(super) fn trains(&self) -> bool {
        self.training.is_on()
    }

    /// Computes the logits `[…, words]` from hidden states `[…, embedding]`.
    ///
    /// # Errors
    /// Returns an error of libtorch if the last dimension is not the embedding size.
    pub fn scores(&self, hidden: &Tensor) -> Result<Tensor> {
        let layer = self.layer.lock();
        linear(hidden, &layer.weight, layer.bias.as_ref())
    }

    /// Computes the cross-entropy of the model's output, [fused](Self::is_fused) or not, with the token ids `targets`
    /// `[n, time]`.
    ///
    /// # Errors
    /// Returns the errors of [`brigade_torch::linear_cross_entropy`], such as for a target that is not in the
    /// vocabulary.
    pub fn loss(
        &self,
        output: &Tensor,
        targets: &Tensor,
        options: &CrossEntropyOptions,
    ) -> Result<CrossEntropyLoss> {
        if !self.is_fused() {
            return cross_entropy(output, targets, options);
        }
        let layer = self.layer.lock();
        linear_cross_entropy(output, &layer.weight, layer.bias.as_ref(), targets, options)
    }
}
