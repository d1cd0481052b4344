//! The dropouts of an AWD-LSTM: of embeddings, of inputs with one mask for the whole sequence, of the recurrent
//! weights.

use brigade_nn::{
    Embedding, EmbeddingOptions, Init, LstmOptions, LstmState, Module, ParamPath, Training,
};
use brigade_torch::Result;
use tch::Tensor;

use crate::init::{Redraw, redraw};

/// Bound of fastai's uniform initial embeddings.
pub(super) const INITIAL_RANGE: f64 = 0.1;

/// Checks a dropout probability; 1 would divide by 0.
fn check(path: &ParamPath<'_>, what: &str, probability: f64) {
    if !(0.0..1.0).contains(&probability) {
        path.reject(format_args!(
            "the probability {probability} of dropping {what} is not in [0, 1)"
        ));
    }
}

/// Padding index with which libtorch treats no row as padding.
const NO_PADDING: i64 = -1;

/// Returns a dropout mask: 0 with probability `p`, otherwise `1 / (1 − p)`.
fn mask(shape: &[i64], probability: f64, like: &Tensor) -> Result<Tensor> {
    let mut mask = Tensor::f_empty(shape, (like.kind(), like.device()))?;
    Ok(mask.f_bernoulli_float_(1.0 - probability)?.f_div_scalar_(1.0 - probability)?)
}

/// Variational dropout: drops features of each sample for all of its time steps, `[n, time, …]` with one mask `[n, 1,
/// …]`.
#[derive(Debug)]
pub(super) struct RnnDropout {
    probability: f64,
    training: Training,
}

impl RnnDropout {
    pub(super) fn new(path: &ParamPath<'_>, probability: f64) -> Self {
        check(path, "a number of a sequence", probability);
        Self { probability, training: path.training() }
    }

    pub(super) fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if self.probability == 0.0 || !self.training.is_on() {
            return Ok(input.shallow_clone());
        }
        let mut shape = input.size();
        if let Some(time) = shape.get_mut(1) {
            *time = 1;
        }
        Ok(input.f_mul(&mask(&shape, self.probability, input)?)?)
    }
}

/// Embedding that drops whole words: all occurrences of a dropped word in the batch become 0.
#[derive(Debug)]
pub(super) struct WordDropout {
    embedding: Embedding,
    probability: f64,
    training: Training,
}

impl WordDropout {
    /// Registers `encoder.weight`, and `encoder_dp.emb.weight` as its second name.
    pub(super) fn new(
        path: &ParamPath<'_>,
        words: i64,
        width: i64,
        padding: i64,
        probability: f64,
    ) -> Self {
        let options = EmbeddingOptions { padding: Some(padding) };
        let embedding = Embedding::with_options(path / "encoder", words, width, options);
        let dropout = path / "encoder_dp";
        check(&dropout, "a word", probability);
        let _ = (&dropout / "emb").tie("weight", embedding.weight());
        Self { embedding, probability, training: dropout.training() }
    }

    /// Draws the initial embedding again, as fastai does after it has built the layers.
    pub(super) fn redraw(&self, path: &ParamPath<'_>) {
        redraw(path, self.weight(), Redraw::Uniform(INITIAL_RANGE));
    }

    pub(super) fn weight(&self) -> &Tensor {
        self.embedding.weight()
    }

    pub(super) fn forward(&self, words: &Tensor) -> Result<Tensor> {
        let vectors = self.embedding.forward(words)?;
        if self.probability == 0.0 || !self.training.is_on() {
            return Ok(vectors);
        }
        // Masks the gathered vectors, not a copy of the whole table: the copy and its gradient would take 200 MB for
        // 60,000 words of width 400.
        let count = self.weight().size().first().copied().unwrap_or_default();
        let factors = mask(&[count, 1], self.probability, self.weight())?;
        let of_words = Tensor::f_embedding(&factors, words, NO_PADDING, false, false)?;
        Ok(vectors.f_mul(&of_words)?)
    }
}

/// LSTM layer with weight dropout: the hidden-to-hidden weights are dropped once per forward, the same for all time
/// steps and the whole batch.
///
/// The parameter is the raw weight, which is trained and saved. In a bidirectional layer only the weights of the
/// forward direction are dropped, as in fastai.
#[derive(Debug)]
pub(super) struct WeightDropLstm {
    /// Weights in the order of [`brigade_nn::Lstm::weights`], with the raw weight in its place.
    weights: Vec<Tensor>,
    options: LstmOptions,
    probability: f64,
    training: Training,
}

/// Index of `weight_hh_l0` among an LSTM's weights.
const HIDDEN_TO_HIDDEN: usize = 1;

impl WeightDropLstm {
    pub(super) fn new(
        path: &ParamPath<'_>,
        inputs: i64,
        hidden: i64,
        bidirectional: bool,
        probability: f64,
    ) -> Self {
        check(path, "a weight", probability);
        let options = LstmOptions { batch_first: true, bidirectional, ..LstmOptions::default() };
        let bound = 1.0 / (hidden.max(1) as f64).sqrt();
        let module = path / "module";
        let mut shapes: Vec<(String, [i64; 2], usize)> = Vec::new();
        for suffix in &["", "_reverse"][..options.directions()] {
            let of_layer = [
                ("weight_ih", [4 * hidden, inputs], 2),
                ("weight_hh", [4 * hidden, hidden], 2),
                ("bias_ih", [4 * hidden, 1], 1),
                ("bias_hh", [4 * hidden, 1], 1),
            ];
            shapes.extend(
                of_layer.map(|(name, shape, dims)| (format!("{name}_l0{suffix}"), shape, dims)),
            );
        }
        // Registered in fastai's order, but drawn in PyTorch's: the raw weight belongs to the wrapper and comes before
        // the module's.
        let (name, shape, dims) = &shapes[HIDDEN_TO_HIDDEN];
        let raw = path.parameter(&format!("{name}_raw"), &shape[..*dims], Init::Zeros);
        let mut weights: Vec<Tensor> = Vec::with_capacity(shapes.len());
        for (place, (name, shape, dims)) in shapes.iter().enumerate() {
            weights.push(match place {
                HIDDEN_TO_HIDDEN => raw.shallow_clone(),
                _ => module.parameter(name, &shape[..*dims], Init::Zeros),
            });
        }
        for weight in &weights {
            redraw(path, weight, Redraw::Uniform(bound));
        }
        Self { weights, options, probability, training: path.training() }
    }

    pub(super) fn directions(&self) -> usize {
        self.options.directions()
    }

    pub(super) fn forward(&self, input: &Tensor, state: &LstmState) -> Result<(Tensor, LstmState)> {
        let training = self.training.is_on();
        let mut weights: Vec<Tensor> = self.weights.iter().map(Tensor::shallow_clone).collect();
        if training && self.probability > 0.0 {
            weights[HIDDEN_TO_HIDDEN] =
                weights[HIDDEN_TO_HIDDEN].f_dropout(self.probability, true)?;
        }
        Ok(self.options.apply(input, state, &weights, training)?)
    }
}
