//! AWD-LSTM, fastai's recurrent network for texts.

mod classifier;
mod decoder;
mod dropout;
mod generate;
mod language_model;
mod pooling;
mod sentence;
mod state;
mod weights;

use std::borrow::Borrow;

use brigade_nn::{Module, ParamPath};
use brigade_rank_env::text::counted;
use brigade_torch::Result;
use tch::Tensor;

pub use self::classifier::{TextClassifier, TextClassifierOptions};
pub use self::decoder::LanguageModelHead;
pub use self::generate::{NextWordOptions, generate_words, next_word};
pub use self::language_model::{LanguageModel, LanguageModelOptions};
pub use self::pooling::masked_concat_pool;
pub use self::sentence::SentenceEncoder;
pub use self::state::{RecurrentState, RnnOutputs};
pub use self::weights::{
    AwdLstmModel, EmbeddingReport, PretrainedLanguageModel, encoder_state, load_encoder,
    read_encoder, save_encoder, with_encoder, write_encoder,
};

use self::dropout::{RnnDropout, WeightDropLstm, WordDropout};

/// The encoder of fastai's [AWD-LSTM](https://docs.fast.ai/text.models.awdlstm.html) (Merity et al., 2017): from token
/// ids `[n, time]` of int64 to the last layer's outputs `[n, time, embedding]`.
///
/// It has four of the five dropouts: of embeddings, of the first layer's input, of the recurrent weights, and of the
/// outputs between layers; the fifth is in the decoder or classifier. The hidden state is kept from batch to batch: see
/// [`RecurrentState`]. Names, and initial values for a seed, are fastai's.
///
/// ```
/// use brigade_models::{AwdLstm, AwdLstmOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = AwdLstmOptions { embedding: 8, hidden: 12, ..AwdLstmOptions::language_model() };
/// let model = Model::new(|path| AwdLstm::new(path, 26, &options))?;
/// assert_eq!(model.num_parameters(), 3216);
/// let words = Tensor::from_slice(&[2i64, 3, 4, 5, 6, 7]).view([2, 3]);
/// assert_eq!(model.forward(&words)?.size(), [2, 3, 8]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct AwdLstm {
    name: String,
    padding: i64,
    words: WordDropout,
    input_dropout: RnnDropout,
    rnns: Vec<WeightDropLstm>,
    /// Dropouts after each layer. The one after the last layer is unused, as in fastai.
    hidden_dropouts: Vec<RnnDropout>,
    state: RecurrentState,
}

/// Sizes and dropout probabilities of an [`AwdLstm`] and of the layers after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AwdLstmOptions {
    /// Embedding size (`emb_sz`), also the width of the last layer's output. Defaults to 400.
    pub embedding: i64,
    /// Hidden size of the layers but the last (`n_hid`). Defaults to 1152.
    pub hidden: i64,
    /// Number of LSTM layers (`n_layers`). Defaults to 3.
    pub layers: usize,
    /// Id of the padding token (`pad_token`), whose embedding gets no gradient. Defaults to 1.
    pub padding: i64,
    /// Reads in both directions, each with half of the hidden size (`bidir`). Defaults to `false`.
    pub bidirectional: bool,
    /// Dropout probabilities of the encoder and the layers after it. Defaults to fastai's.
    pub dropout: AwdLstmDropout,
}

/// Dropout probabilities of an AWD-LSTM's five dropouts, each in `[0, 1)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AwdLstmDropout {
    /// Dropout probability of a token's embedding, at all its positions in a batch (`embed_p`).
    pub embedding: f64,
    /// Dropout probability of the first layer's inputs, with one mask for the whole sequence (`input_p`).
    pub input: f64,
    /// Dropout probability of the recurrent weights (`weight_p`).
    pub weight: f64,
    /// Dropout probability between two layers, with one mask for the whole sequence (`hidden_p`).
    pub hidden: f64,
    /// Dropout probability of the decoder's inputs, with one mask for the whole sequence, or of the inputs of the
    /// classifier's first layer (`output_p`).
    pub output: f64,
}

impl AwdLstmDropout {
    /// Returns all probabilities multiplied by `factor` (fastai's `drop_mult`).
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self {
            embedding: self.embedding * factor,
            input: self.input * factor,
            weight: self.weight * factor,
            hidden: self.hidden * factor,
            output: self.output * factor,
        }
    }
}

impl AwdLstmOptions {
    const SIZES: Self = Self {
        embedding: 400,
        hidden: 1152,
        layers: 3,
        padding: 1,
        bidirectional: false,
        dropout: AwdLstmDropout {
            embedding: 0.0,
            input: 0.0,
            weight: 0.0,
            hidden: 0.0,
            output: 0.0,
        },
    };

    /// Returns the options of fastai's `awd_lstm_lm_config`.
    #[must_use]
    pub fn language_model() -> Self {
        let dropout =
            AwdLstmDropout { embedding: 0.02, input: 0.25, weight: 0.2, hidden: 0.15, output: 0.1 };
        Self { dropout, ..Self::SIZES }
    }

    /// Returns the options of fastai's `awd_lstm_clas_config`.
    #[must_use]
    pub fn classifier() -> Self {
        let dropout =
            AwdLstmDropout { embedding: 0.05, input: 0.4, weight: 0.5, hidden: 0.3, output: 0.4 };
        Self { dropout, ..Self::SIZES }
    }

    /// Returns the options with all dropout probabilities multiplied by `factor`.
    #[must_use]
    pub fn drop_mult(self, factor: f64) -> Self {
        Self { dropout: self.dropout.scaled(factor), ..self }
    }

    /// Returns the number of features of each direction of a layer's output.
    fn width(&self, layer: usize) -> i64 {
        let whole = if layer + 1 == self.layers { self.embedding } else { self.hidden };
        whole / if self.bidirectional { 2 } else { 1 }
    }
}

impl AwdLstm {
    /// Registers all layers below the path, for a vocabulary of `words` tokens.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, words: i64, options: &AwdLstmOptions) -> Self {
        let path = path.borrow();
        let AwdLstmOptions { embedding, hidden, layers, padding, bidirectional, dropout } =
            *options;
        if layers == 0 || embedding < 1 || hidden < 1 {
            path.reject(format_args!(
                "an AWD-LSTM of {}, {} a word and {hidden} hidden ones: each has to be at least 1",
                counted(layers, "layer"),
                counted(embedding, "number")
            ));
        }
        if bidirectional && (embedding % 2 != 0 || (layers > 1 && hidden % 2 != 0)) {
            path.reject(format_args!(
                "two directions share {embedding} and {hidden} numbers: both have to be even"
            ));
        }
        let encoder = WordDropout::new(path, words, embedding, padding, dropout.embedding);
        let rnns: Vec<WeightDropLstm> = (0..layers)
            .map(|layer| {
                let inputs = if layer == 0 { embedding } else { hidden };
                let path = path / "rnns" / layer;
                WeightDropLstm::new(
                    &path,
                    inputs,
                    options.width(layer),
                    bidirectional,
                    dropout.weight,
                )
            })
            .collect();
        encoder.redraw(path);
        let shapes =
            rnns.iter().enumerate().map(|(layer, rnn)| (rnn.directions(), options.width(layer)));
        let hidden_dropouts = path / "hidden_dps";
        Self {
            name: path.name().to_owned(),
            padding,
            words: encoder,
            input_dropout: RnnDropout::new(&(path / "input_dp"), dropout.input),
            hidden_dropouts: (0..layers)
                .map(|layer| RnnDropout::new(&(&hidden_dropouts / layer), dropout.hidden))
                .collect(),
            state: RecurrentState::new(shapes.collect()),
            rnns,
        }
    }

    /// Returns the full name of the encoder in the model, or an empty string if the encoder is the model's root.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the handle of the hidden state and of the outputs that are kept in training.
    #[must_use]
    pub fn state(&self) -> &RecurrentState {
        &self.state
    }

    /// Returns the weight of the embedding, `[words, embedding]`.
    pub fn embedding(&self) -> &Tensor {
        self.words.weight()
    }

    /// Computes the outputs for embedding vectors `[n, time, embedding]` instead of token ids.
    ///
    /// # Errors
    /// Returns an error of libtorch if the shape does not fit.
    pub fn forward_embedded(&self, vectors: &Tensor) -> Result<Tensor> {
        let (rows, ..) = vectors.size3()?;
        let states = self.state.of_rows(rows, vectors)?;
        let mut output = self.input_dropout.forward(vectors)?;
        let mut last = Vec::with_capacity(states.len());
        for (layer, (rnn, state)) in self.rnns.iter().zip(&states).enumerate() {
            let (next, state) = rnn.forward(&output, state)?;
            last.push(brigade_nn::LstmState {
                hidden: state.hidden.f_detach()?,
                cell: state.cell.f_detach()?,
            });
            output = match self.hidden_dropouts.get(layer) {
                Some(dropout) if layer + 1 < self.rnns.len() => dropout.forward(&next)?,
                _ => next,
            };
        }
        self.state.put(last);
        Ok(output)
    }

    /// Returns the names of the modules of each layer below the path, for parameter groups.
    fn layer_names(&self) -> Vec<String> {
        (0..self.rnns.len()).map(|layer| self.below(&format!("rnns.{layer}"))).collect()
    }

    fn below(&self, name: &str) -> String {
        if self.name.is_empty() { name.to_owned() } else { format!("{}.{name}", self.name) }
    }
}

impl Module<&Tensor> for AwdLstm {
    type Output = Tensor;

    fn forward(&self, words: &Tensor) -> Result<Tensor> {
        self.forward_embedded(&self.words.forward(words)?)
    }
}
