//! AWD-LSTM language model.

use std::borrow::Borrow;

use brigade_nn::{Init, LayerGroups, Linear, LinearOptions, Module, ParamPath};
use brigade_torch::Result;
use tch::Tensor;

use super::decoder::LanguageModelHead;
use super::dropout::{INITIAL_RANGE, RnnDropout};
use super::state::{RecurrentState, RnnOutputs};
use super::weights::AwdLstmModel;
use super::{AwdLstm, AwdLstmOptions};
use crate::init::{Redraw, redraw};

/// fastai's AWD-LSTM language model
/// ([`get_language_model`](https://docs.fast.ai/text.models.core.html#get_language_model)): from token ids `[n, time]`
/// of int64 to the logits of the next tokens, `[n, time, words]`.
///
/// The encoder is below `0` and the decoder below `1`, under the names of fastai's files; the decoder's weight is tied
/// to the embedding. [`LayerGroups`] returns fastai's groups: each layer, and last the embedding with the decoder. Use
/// [`LanguageModel::head`] to train without storing all logits, and [`LanguageModel::state`] for the outputs for AR and
/// TAR.
///
/// ```
/// use brigade_models::{LanguageModel, LanguageModelOptions};
/// use brigade_nn::Model;
///
/// let options = LanguageModelOptions::default().drop_mult(0.5);
/// let model = Model::new(|path| LanguageModel::new(path, 1000, &options))?;
/// assert_eq!(model.num_parameters(), 20_674_280);
/// assert_eq!(model.param_groups()?[3], ["0.encoder.weight", "1.decoder.bias"]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct LanguageModel {
    encoder: AwdLstm,
    output_dropout: RnnDropout,
    head: LanguageModelHead,
    /// Full name of the decoder.
    decoder: String,
}

/// Options of a [`LanguageModel`], with fastai's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LanguageModelOptions {
    /// Options of the encoder, and the dropout before the decoder.
    pub encoder: AwdLstmOptions,
    /// Ties the decoder's weight to the embedding (`tie_weights`). Defaults to `true`.
    pub tie_weights: bool,
    /// Adds a bias to the decoder (`out_bias`). Defaults to `true`.
    pub bias: bool,
}

impl Default for LanguageModelOptions {
    fn default() -> Self {
        Self { encoder: AwdLstmOptions::language_model(), tie_weights: true, bias: true }
    }
}

impl LanguageModelOptions {
    /// Returns the options with all dropout probabilities multiplied by `factor`.
    #[must_use]
    pub fn drop_mult(self, factor: f64) -> Self {
        Self { encoder: self.encoder.drop_mult(factor), ..self }
    }
}

impl LanguageModel {
    /// Registers all layers below the path, for a vocabulary of `words` tokens.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        words: i64,
        options: &LanguageModelOptions,
    ) -> Self {
        let (encoder_path, after) = (path.borrow() / 0, path.borrow() / 1);
        let encoder = AwdLstm::new(encoder_path, words, &options.encoder);
        let decoder = &after / "decoder";
        let (weight, bias) = if options.tie_weights {
            (
                decoder.tie("weight", encoder.embedding()),
                options.bias.then(|| decoder.parameter("bias", &[words], Init::Zeros)),
            )
        } else {
            // Drawn twice, as fastai does.
            let options = LinearOptions { bias: options.bias };
            let width = encoder.embedding().size().last().copied().unwrap_or_default();
            let layer = Linear::with_options(&decoder, width, words, options);
            redraw(&decoder, layer.weight(), Redraw::Uniform(INITIAL_RANGE));
            if let Some(bias) = layer.bias() {
                redraw(&decoder, bias, Redraw::Constant(0.0));
            }
            (layer.weight().shallow_clone(), layer.bias().map(Tensor::shallow_clone))
        };
        Self {
            encoder,
            output_dropout: RnnDropout::new(
                &(&after / "output_dp"),
                options.encoder.dropout.output,
            ),
            head: LanguageModelHead::new(weight, bias, decoder.training()),
            decoder: after.name().to_owned(),
        }
    }

    /// Returns the handle of the hidden state and of the outputs that are kept in training.
    #[must_use]
    pub fn state(&self) -> &RecurrentState {
        self.encoder.state()
    }

    /// Returns the decoder, for a loss that is computed with it.
    #[must_use]
    pub fn head(&self) -> &LanguageModelHead {
        &self.head
    }

    /// Computes the decoder's input, `[n, time, embedding]`, after the dropout.
    ///
    /// # Errors
    /// Returns the errors of the encoder's forward.
    pub fn decoder_input(&self, words: &Tensor) -> Result<Tensor> {
        let raw = self.encoder.forward(words)?;
        let dropped = self.output_dropout.forward(&raw)?;
        if self.head.trains() && self.state().keeps_outputs() {
            self.state().put_outputs(RnnOutputs { raw, dropped: dropped.shallow_clone() });
        }
        Ok(dropped)
    }
}

impl AwdLstmModel for LanguageModel {
    fn encoder(&self) -> &AwdLstm {
        &self.encoder
    }

    fn decoder(&self) -> Option<String> {
        Some(format!("{}.decoder", self.decoder))
    }
}

impl LayerGroups for LanguageModel {
    /// Groups the layers as fastai's `awd_lstm_lm_split` does.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let layers = self.encoder.layer_names().into_iter().map(|name| vec![name]);
        layers.chain([vec![self.encoder.below("encoder"), self.decoder.clone()]]).collect()
    }
}

impl Module<&Tensor> for LanguageModel {
    type Output = Tensor;

    fn forward(&self, words: &Tensor) -> Result<Tensor> {
        let hidden = self.decoder_input(words)?;
        if self.head.is_fused() { Ok(hidden) } else { self.head.scores(&hidden) }
    }
}
