//! BERT as a masked language model and as a classifier.

use std::borrow::Borrow;

use brigade_nn::{
    Dropout, Init, LayerGroups, LayerNorm, Linear, Module, ParamPath, TensorParallelPlan,
};
use brigade_sharding::TensorPlan;
use brigade_torch::{Activation, Result};
use tch::{Device, Kind, Tensor};

use super::super::head::LanguageHead;
use super::super::init::draw;
use super::super::loss::{ProblemType, TokenLoss, sequence_loss, token_loss};
use super::super::{IGNORED_LABEL, Tokens, Transformer};
use super::{BODY, Bert, BertOptions, BodyStates, EMBEDDING, POOLER, norm};
use crate::init::{Redraw, redraw};

/// BERT as a masked language model: from [`Tokens`] to logits `[batch, tokens, vocab_size]` of the token at each
/// position.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `BertForMaskedLM`; the head's weight is
/// tied to the embedding.
///
/// ```
/// use brigade_models::{BertForMaskedLm, BertOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = BertOptions {
///     vocab_size: 50, hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 1, ..Default::default()
/// };
/// let model = Model::new(|path| BertForMaskedLm::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 3, 9]).view([1, 3]);
/// assert_eq!(model.forward(&ids)?.size(), [1, 3, 50]);
/// // Token 8 was masked by 3; the head computes this position only.
/// let labels = Tensor::from_slice(&[-100i64, 8, -100]).view([1, 3]);
/// assert_eq!(model.module().loss(&ids, &labels, 0.0)?.count.int64_value(&[]), 1);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct BertForMaskedLm {
    bert: Bert,
    dense: Linear,
    activation: Activation,
    norm: LayerNorm,
    predictions: LanguageHead,
    head: String,
}

impl BertForMaskedLm {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &BertOptions) -> Self {
        let path = path.borrow();
        let BertOptions { vocab_size, hidden_size: width, .. } = *options;
        let bert = Bert::with_pooler(&(path / "bert"), options, false);
        let head = path / "cls";
        let predictions = &head / "predictions";
        let divided = bert.word_embeddings.divided().filter(|_| options.tie_word_embeddings);
        let bias = predictions.divided_bias("bias", vocab_size, divided, Init::Zeros);
        let transform = &predictions / "transform";
        let dense = Linear::new(&transform / "dense", width, width);
        let norm = norm(&transform / "LayerNorm", options);
        let decoder = &predictions / "decoder";
        let predicted = if options.tie_word_embeddings {
            // transformers initialises a decoder before it ties it.
            let deviation = options.initializer_range;
            path.redraw(dense.weight(), move |values| {
                let form = (Kind::Float, Device::Cpu);
                let _ = Tensor::f_empty([vocab_size, width], form)?.f_uniform_(0.0, 1.0)?;
                let _ = Tensor::f_empty([vocab_size], form)?.f_uniform_(0.0, 1.0)?;
                Redraw::Normal(deviation).fill(values)
            });
            if let Some(bias) = dense.bias() {
                redraw(path, bias, Redraw::Constant(0.0));
            }
            let weight = decoder.tie("weight", bert.word_embeddings.weight());
            let bias = decoder.tie("bias", &bias);
            LanguageHead::with_bias(&decoder, weight, Some(bias), divided)
        } else {
            let own = Linear::new(&decoder, width, vocab_size);
            draw(path, &dense, options.initializer_range);
            draw(path, &own, options.initializer_range);
            let shared = own.bias().map_or_else(|| bias.shallow_clone(), Tensor::shallow_clone);
            let weight = own.weight().shallow_clone();
            LanguageHead::with_bias(&decoder, weight, Some(shared), own.divided())
        };
        Self {
            bert,
            dense,
            activation: options.hidden_act,
            norm,
            predictions: predicted,
            head: head.name().to_owned(),
        }
    }

    /// Returns the transformer body, without its head.
    #[must_use]
    pub fn body(&self) -> &Bert {
        &self.bert
    }

    /// Computes the body's hidden states `[batch, tokens, hidden_size]`.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    pub fn hidden<'t>(&self, tokens: impl Into<Tokens<'t>>) -> Result<Tensor> {
        self.bert.forward(tokens)
    }

    /// Computes the loss for labels `[batch, tokens]`, with [`IGNORED_LABEL`] for positions that are not to be
    /// predicted. It is that of [`crate::token_loss`], but the head is computed only for positions with a label,
    /// usually 15 % of them.
    ///
    /// # Errors
    /// Returns the errors of the forward, and fails for labels that are not in the vocabulary.
    pub fn loss<'t>(
        &self,
        tokens: impl Into<Tokens<'t>>,
        labels: &Tensor,
        smoothing: f64,
    ) -> Result<TokenLoss> {
        let BodyStates { hidden, part, word_weight } = self.bert.own_states(tokens.into(), None)?;
        let tied = self.tied(&word_weight);
        let labels = part.take_or(labels, 1, IGNORED_LABEL)?.f_reshape([-1])?;
        let counted = labels.f_ne(IGNORED_LABEL)?.f_nonzero()?.f_squeeze_dim(-1)?;
        let rows = hidden.f_flatten(0, 1)?.f_index_select(0, &counted)?;
        let labels = labels.f_index_select(0, &counted)?;
        let rows = self.transformed(&rows)?;
        self.predictions.loss(&rows, tied, &labels, smoothing)?.over(&part)
    }

    /// Returns the embedding's weight for a head that is tied to it.
    fn tied<'t>(&self, word_weight: &'t Option<Tensor>) -> Option<&'t Tensor> {
        word_weight.as_ref().filter(|_| self.bert.options.tie_word_embeddings)
    }

    fn transformed(&self, hidden: &Tensor) -> Result<Tensor> {
        let inner = self.dense.forward_pre_activation(hidden)?;
        self.norm.forward(&inner.activate(self.activation)?)
    }
}

impl<'t, I: Into<Tokens<'t>>> Module<I> for BertForMaskedLm {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        let BodyStates { hidden, part, word_weight } = self.bert.own_states(tokens.into(), None)?;
        let tied = self.tied(&word_weight);
        part.gather(&self.predictions.forward(&self.transformed(&hidden)?, tied)?, 1)
    }
}

impl TensorParallelPlan for BertForMaskedLm {
    /// Returns the body's plan, with the head divided by its vocabulary.
    fn tensor_plan() -> TensorPlan {
        Bert::tensor_plan()
            .and(TensorPlan::new().vocabulary("*predictions.decoder.weight").optional())
    }
}

impl LayerGroups for BertForMaskedLm {
    /// Groups the parameters: the embeddings, to which the head is tied, each layer, and the head.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let mut groups = self.bert.layer_groups();
        groups.push(vec![self.head.clone()]);
        groups
    }
}

/// BERT as a classifier of texts or of pairs of texts: from [`Tokens`] to logits `[batch, labels]`.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `BertForSequenceClassification`.
///
/// ```
/// use brigade_models::{BertForSequenceClassification, BertOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = BertOptions {
///     vocab_size: 50, hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 1, ..Default::default()
/// };
/// let options = options.with_classes(3);
/// let model = Model::new(|path| BertForSequenceClassification::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 8, 9, 7, 8, 0]).view([2, 3]);
/// let logits = model.forward((&ids, &ids.ne(0)))?;
/// assert_eq!(logits.size(), [2, 3]);
/// let loss = model.module().loss(&logits, &Tensor::from_slice(&[2i64, 0]), 0.0)?;
/// assert_eq!(loss.count.int64_value(&[]), 2);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct BertForSequenceClassification {
    bert: Bert,
    classifier: Classifier,
}

impl BertForSequenceClassification {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &BertOptions) -> Self {
        let path = path.borrow();
        let bert = Bert::with_pooler(&(path / "bert"), options, true);
        Self { bert, classifier: Classifier::new(path, options) }
    }

    /// Returns the transformer body, without its head.
    #[must_use]
    pub fn body(&self) -> &Bert {
        &self.bert
    }

    /// Computes the loss of logits by [`sequence_loss`], with the problem type of the options, or by default the one
    /// that follows from the labels.
    ///
    /// # Errors
    /// Fails for labels that do not match the logits.
    pub fn loss(&self, logits: &Tensor, labels: &Tensor, smoothing: f64) -> Result<TokenLoss> {
        let outputs = logits.size().last().copied().unwrap_or(0);
        let told = || ProblemType::of(outputs, labels.kind());
        let problem = self.bert.options.problem_type.unwrap_or_else(told);
        sequence_loss(logits, labels, problem, smoothing)
    }
}

impl<'t, I: Into<Tokens<'t>>> Module<I> for BertForSequenceClassification {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        self.classifier.forward(&self.bert.pooled(&self.bert.forward(tokens)?)?)
    }
}

impl TensorParallelPlan for BertForSequenceClassification {
    /// Returns the body's plan; the classifier is whole on every rank.
    fn tensor_plan() -> TensorPlan {
        Bert::tensor_plan()
    }
}

impl LayerGroups for BertForSequenceClassification {
    /// Groups the parameters: the embeddings, each layer, and the pooler with the classifier.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let mut groups = self.bert.layer_groups();
        if let Some(last) = groups.last_mut() {
            last.push(self.classifier.name.clone());
        }
        groups
    }
}

/// BERT as a classifier of tokens: from [`Tokens`] to logits `[batch, tokens, labels]`.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `BertForTokenClassification`.
///
/// ```
/// use brigade_models::{BertForTokenClassification, BertOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = BertOptions {
///     vocab_size: 50, hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 1, ..Default::default()
/// };
/// let options = options.with_classes(5);
/// let model = Model::new(|path| BertForTokenClassification::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 8, 9]).view([1, 3]);
/// let logits = model.forward(&ids)?;
/// let labels = Tensor::from_slice(&[4i64, -100, 0]).view([1, 3]);
/// assert_eq!(model.module().loss(&logits, &labels, 0.0)?.count.int64_value(&[]), 2);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct BertForTokenClassification {
    bert: Bert,
    classifier: Classifier,
}

impl BertForTokenClassification {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &BertOptions) -> Self {
        let path = path.borrow();
        let bert = Bert::with_pooler(&(path / "bert"), options, false);
        Self { bert, classifier: Classifier::new(path, options) }
    }

    /// Returns the transformer body, without its head.
    #[must_use]
    pub fn body(&self) -> &Bert {
        &self.bert
    }

    /// Computes the loss of logits for labels `[batch, tokens]`, by [`token_loss`].
    ///
    /// # Errors
    /// Fails for labels that do not match the logits.
    pub fn loss(&self, logits: &Tensor, labels: &Tensor, smoothing: f64) -> Result<TokenLoss> {
        token_loss(logits, labels, smoothing)
    }
}

impl<'t, I: Into<Tokens<'t>>> Module<I> for BertForTokenClassification {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        self.classifier.forward(&self.bert.forward(tokens)?)
    }
}

impl TensorParallelPlan for BertForTokenClassification {
    /// Returns the body's plan; the classifier is whole on every rank.
    fn tensor_plan() -> TensorPlan {
        Bert::tensor_plan()
    }
}

impl LayerGroups for BertForTokenClassification {
    /// Groups the parameters: the embeddings, each layer, and the classifier.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let mut groups = self.bert.layer_groups();
        groups.push(vec![self.classifier.name.clone()]);
        groups
    }
}

/// Dropout and a linear layer.
#[derive(Debug)]
struct Classifier {
    dropout: Dropout,
    linear: Linear,
    name: String,
}

impl Classifier {
    fn new(path: &ParamPath<'_>, options: &BertOptions) -> Self {
        let dropout = options.classifier_dropout.unwrap_or(options.hidden_dropout_prob);
        let dropout = Dropout::maskless(path / "dropout", dropout);
        let name = path / "classifier";
        let linear = Linear::new(&name, options.hidden_size, options.classes());
        draw(path, &linear, options.initializer_range);
        Self { dropout, linear, name: name.name().to_owned() }
    }

    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        self.linear.forward(&self.dropout.forward(hidden)?)
    }
}

macro_rules! transformer {
    ($model:ty, $architecture:literal) => {
        impl Transformer for $model {
            type Options = BertOptions;

            const ARCHITECTURE: &'static str = $architecture;
            const BODY: &'static str = BODY;
            const EMBEDDING: &'static str = EMBEDDING;

            fn build(path: &ParamPath<'_>, options: &BertOptions) -> Self {
                Self::new(path, options)
            }

            fn options(&self) -> &BertOptions {
                &self.bert.options
            }

            fn is_optional(name: &str) -> bool {
                name.starts_with(POOLER)
            }
        }
    };
}

transformer!(BertForMaskedLm, "BertForMaskedLM");
transformer!(BertForSequenceClassification, "BertForSequenceClassification");
transformer!(BertForTokenClassification, "BertForTokenClassification");
