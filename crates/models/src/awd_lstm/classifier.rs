//! AWD-LSTM text classifier.

use std::borrow::Borrow;

use brigade_nn::{LayerGroups, Module, ParamPath, Sequential, Training};
use brigade_torch::Result;
use tch::Tensor;

use super::pooling::{linear_layers, masked_concat_pool};
use super::sentence::SentenceEncoder;
use super::state::{RecurrentState, RnnOutputs};
use super::weights::AwdLstmModel;
use super::{AwdLstm, AwdLstmOptions};

/// fastai's AWD-LSTM text classifier
/// ([`get_text_classifier`](https://docs.fast.ai/text.models.core.html#get_text_classifier)): from token ids `[n,
/// time]` of int64 to the logits of classes, `[n, classes]`. See [`SentenceEncoder`] for the padding and reading of
/// texts.
///
/// The encoder is below `0.module` and the layers after the pooling below `1.layers`, under the names of fastai's
/// files. [`LayerGroups`] returns fastai's groups: the embedding, each layer, the layers after the pooling.
///
/// ```
/// use brigade_models::{TextClassifier, TextClassifierOptions};
/// use brigade_nn::Model;
///
/// let options = TextClassifierOptions::default().drop_mult(0.5);
/// let model = Model::new(|path| TextClassifier::new(path, 1000, 2, &options))?;
/// assert_eq!(model.num_parameters(), 20_735_880);
/// assert_eq!(model.param_groups()?.len(), 5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct TextClassifier {
    encoder: SentenceEncoder,
    layers: Sequential,
    training: Training,
    fastai_last: bool,
    /// Full name of the part after the encoder.
    head: String,
}

/// Options of a [`TextClassifier`], with fastai's defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct TextClassifierOptions {
    /// Options of the encoder, and the dropout of the first layer after the pooling.
    pub encoder: AwdLstmOptions,
    /// Number of tokens after which back-propagation through time is truncated. Defaults to 72.
    pub seq_len: i64,
    /// Number of tokens, at the end of each text, whose outputs are pooled, or `None` for all. Defaults to 1440.
    pub max_len: Option<i64>,
    /// Widths of the hidden linear layers (`lin_ftrs`). Defaults to one of 50.
    pub hidden: Vec<i64>,
    /// Dropout probabilities of the linear layers except the first one (`ps`), which
    /// [`TextClassifierOptions::drop_mult`] leaves unchanged. `None` means 0.1 for each.
    pub dropout: Option<Vec<f64>>,
    /// Pools the position that fastai takes for the last token of a text, which is padding in short texts, for
    /// compatibility with weights that fastai has trained ([`masked_concat_pool`](crate::masked_concat_pool)). Defaults
    /// to `false`.
    pub fastai_last: bool,
    /// Range `[low, high]` to which a sigmoid scales the output (`y_range`), for regression. Defaults to none.
    pub y_range: Option<[f64; 2]>,
}

impl Default for TextClassifierOptions {
    fn default() -> Self {
        Self {
            encoder: AwdLstmOptions::classifier(),
            seq_len: 72,
            max_len: Some(72 * 20),
            hidden: vec![50],
            dropout: None,
            fastai_last: false,
            y_range: None,
        }
    }
}

impl TextClassifierOptions {
    /// Returns the options with the encoder's dropout probabilities multiplied by `factor`.
    #[must_use]
    pub fn drop_mult(self, factor: f64) -> Self {
        Self { encoder: self.encoder.drop_mult(factor), ..self }
    }
}

impl TextClassifier {
    /// Registers all layers below the path, for a vocabulary of `words` tokens.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        words: i64,
        classes: i64,
        options: &TextClassifierOptions,
    ) -> Self {
        let path = path.borrow();
        let TextClassifierOptions { encoder, seq_len, max_len, hidden, .. } = options;
        let head = path / 1;
        let pooled = 3 * encoder.embedding;
        let sizes: Vec<i64> =
            [pooled].into_iter().chain(hidden.iter().copied()).chain([classes]).collect();
        let others = options.dropout.clone().unwrap_or_else(|| vec![0.1; hidden.len()]);
        let dropout = [vec![encoder.dropout.output], others].concat();
        Self {
            encoder: SentenceEncoder::new(path / 0, words, encoder, *seq_len, *max_len),
            layers: linear_layers(&head, &sizes, &dropout, options.y_range),
            training: head.training(),
            fastai_last: options.fastai_last,
            head: head.name().to_owned(),
        }
    }

    /// Returns the handle of the outputs that are kept in training. The hidden state is reset before each batch.
    #[must_use]
    pub fn state(&self) -> &RecurrentState {
        self.encoder.encoder().state()
    }

    /// Computes the encoder's outputs and the padding mask.
    ///
    /// # Errors
    /// Returns the errors of the encoder's forward, for a text without tokens or for invalid shapes.
    pub fn encode(&self, words: &Tensor) -> Result<(Tensor, Tensor)> {
        self.encoder.forward(words)
    }
}

impl AwdLstmModel for TextClassifier {
    fn encoder(&self) -> &AwdLstm {
        self.encoder.encoder()
    }

    fn decoder(&self) -> Option<String> {
        None
    }
}

impl LayerGroups for TextClassifier {
    /// Groups the layers as fastai's `awd_lstm_clas_split` does.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let encoder = self.encoder.encoder();
        let layers = encoder.layer_names().into_iter().map(|name| vec![name]);
        let words = [vec![encoder.below("encoder")]].into_iter();
        words.chain(layers).chain([vec![self.head.clone()]]).collect()
    }
}

impl Module<&Tensor> for TextClassifier {
    type Output = Tensor;

    fn forward(&self, words: &Tensor) -> Result<Tensor> {
        let (outputs, padding) = self.encode(words)?;
        let fastai_last = self.fastai_last.then(|| self.encoder.seq_len());
        let pooled = masked_concat_pool(&outputs, &padding, fastai_last)?;
        if self.training.is_on() && self.state().keeps_outputs() {
            let dropped = outputs.shallow_clone();
            self.state().put_outputs(RnnOutputs { raw: outputs, dropped });
        }
        self.layers.forward(&pooled)
    }
}
