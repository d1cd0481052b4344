//! Head of a language model.

use brigade_nn::{Divided, Embedding, Init, LayerWeights, ParamPath, QuantizedSlot};
use brigade_sharding::TensorStyle;
use brigade_torch::{Result, linear};
use tch::Tensor;

use super::loss::{TokenLoss, head_loss};
use super::vocabulary_logits::VocabularyLogits;
use crate::init::{Redraw, redraw};

/// Linear layer to the vocabulary, often tied to the embedding.
#[derive(Debug)]
pub(super) struct LanguageHead {
    /// Weight `[vocabulary, width]`. If the vocabulary is divided, this rank's part.
    weight: Tensor,
    /// Bias `[vocabulary]`, divided in the same way.
    bias: Option<Tensor>,
    divided: Option<Divided>,
    /// Full name, if the weight is not tied.
    own: Option<String>,
    /// Loader of the weights for a forward.
    weights: LayerWeights,
    quantized: QuantizedSlot,
}

impl LanguageHead {
    pub(super) fn new(
        path: &ParamPath<'_>,
        shape: [i64; 2],
        deviation: f64,
        tied: Option<&Embedding>,
    ) -> Self {
        if let Some(embedding) = tied {
            let weight = path.tie("weight", embedding.weight());
            return Self::with_bias(path, weight, None, embedding.divided());
        }
        let (weight, divided) =
            path.divided_parameter("weight", &shape, [0, 1], Init::KaimingUniform);
        if let Some(Divided { style, .. }) = &divided
            && *style != TensorStyle::Vocabulary
        {
            path.reject(format_args!(
                "a language head is divided by its vocabulary, but the tensor plan has {style}"
            ));
        }
        redraw(path, &weight, Redraw::Normal(deviation));
        let quantized = path.quantizable("weight", false);
        let (own, weights) = (Some(path.name().to_owned()), path.layer_weights());
        Self { weight, bias: None, divided, own, quantized, weights }
    }

    /// Creates a head whose parameters at the path may also belong to other layers, with their division.
    pub(super) fn with_bias(
        path: &ParamPath<'_>,
        weight: Tensor,
        bias: Option<Tensor>,
        divided: Option<&Divided>,
    ) -> Self {
        Self {
            weight,
            bias,
            divided: divided.cloned(),
            own: None,
            quantized: QuantizedSlot::default(),
            weights: path.layer_weights(),
        }
    }

    /// Returns the logits `[…, vocabulary]`, on every rank. `tied` is the weight as the embedding's forward returned it.
    pub(super) fn forward(&self, hidden: &Tensor, tied: Option<&Tensor>) -> Result<Tensor> {
        self.logits(hidden, tied)?.whole()
    }

    /// Returns the logits. If the vocabulary is divided, this rank's part.
    pub(super) fn logits(
        &self,
        hidden: &Tensor,
        tied: Option<&Tensor>,
    ) -> Result<VocabularyLogits> {
        let (weight, bias) = (tied.unwrap_or(&self.weight), self.bias.as_ref());
        self.weights.run(hidden, |hidden| {
            if let Some(quantized) = self.quantized.get() {
                return Ok(VocabularyLogits::new(quantized.linear(hidden, bias)?, None));
            }
            let own = match &self.divided {
                Some(Divided { region, .. }) => linear(&region.enter(hidden)?, weight, bias)?,
                None => linear(hidden, weight, bias)?,
            };
            Ok(VocabularyLogits::new(own, self.divided.as_ref()))
        })
    }

    /// The loss of labels `[…]` for hidden states `[…, width]`, without all of the logits: those of labels that count
    /// are computed, some at a time; of a divided vocabulary each rank computes its part, and no logits are sent.
    pub(super) fn loss(
        &self,
        hidden: &Tensor,
        tied: Option<&Tensor>,
        labels: &Tensor,
        smoothing: f64,
    ) -> Result<TokenLoss> {
        let weight = tied.unwrap_or(&self.weight);
        self.weights.run(hidden, |hidden| {
            let quantized = self.quantized.get();
            let dequantized =
                quantized.map(|weight| weight.dequantize(hidden.f_kind()?)).transpose()?;
            head_loss(
                hidden,
                dequantized.as_ref().unwrap_or(weight),
                self.bias.as_ref(),
                self.divided.as_ref(),
                &labels.f_to_device(hidden.device())?,
                smoothing,
            )
        })
    }

    /// Returns the logits `[batch, vocabulary]` of the last token.
    pub(super) fn last(&self, hidden: &Tensor) -> Result<VocabularyLogits> {
        self.logits(&hidden.f_select(1, -1)?, None)
    }

    /// Returns a body's parameter groups with the head in the last one.
    pub(super) fn with_groups(&self, mut groups: Vec<Vec<String>>) -> Vec<Vec<String>> {
        if let (Some(last), Some(own)) = (groups.last_mut(), &self.own) {
            last.push(own.clone());
        }
        groups
    }
}
