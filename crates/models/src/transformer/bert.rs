//! BERT, after Hugging Face's transformers.

mod heads;
mod layer;

use std::borrow::Borrow;

use brigade_nn::{
    ContextPart, Dropout, Embedding, EmbeddingOptions, LayerGroups, LayerNorm, LayerNormOptions,
    Linear, Module, ParamPath, TensorParallelPlan,
};
use brigade_sharding::TensorPlan;
use brigade_torch::{Activation, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Tensor;

pub use self::heads::{BertForMaskedLm, BertForSequenceClassification, BertForTokenClassification};
use self::layer::BertLayer;
use super::attention::Shared;
use super::blocks::Blocks;
use super::config::{self, ConfigError, TransformerOptions};
use super::context::Context;
use super::{ProblemType, Tokens, Transformer, full_name, init};

/// Options of a [`Bert`], under the names of transformers' `BertConfig`. The defaults are those of `bert-base-uncased`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BertOptions {
    /// Vocabulary size. Defaults to 30522.
    pub vocab_size: i64,
    /// Hidden size: the width of each token's embedding. Defaults to 768.
    pub hidden_size: i64,
    /// Number of layers. Defaults to 12.
    pub num_hidden_layers: usize,
    /// Number of attention heads, a divisor of the hidden size. Defaults to 12.
    pub num_attention_heads: i64,
    /// Intermediate size: the width inside each feed-forward layer. Defaults to 3072.
    pub intermediate_size: i64,
    /// Activation of the feed-forward layers. Defaults to [`Activation::Gelu`].
    #[serde(with = "config::activation")]
    pub hidden_act: Activation,
    /// Dropout probability of the embeddings and of the residual branches. Defaults to 0.1.
    pub hidden_dropout_prob: f64,
    /// Dropout probability of the attention weights. Defaults to 0.1.
    pub attention_probs_dropout_prob: f64,
    /// Maximum sequence length in tokens. Defaults to 512.
    pub max_position_embeddings: i64,
    /// Number of token types: the segments of a pair of texts. Defaults to 2.
    pub type_vocab_size: i64,
    /// Standard deviation of the initial weights. Defaults to 0.02.
    pub initializer_range: f64,
    /// Epsilon of the layer norms. Defaults to 1e-12.
    pub layer_norm_eps: f64,
    /// Id of the padding token, whose embedding is not trained. Defaults to 0.
    pub pad_token_id: Option<i64>,
    /// Dropout probability before a classifier. Defaults to `hidden_dropout_prob`.
    pub classifier_dropout: Option<f64>,
    /// Problem type of a text classifier. By default it follows from the labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem_type: Option<ProblemType>,
    /// Ties the masked language model's head to the embedding. Defaults to `true`.
    pub tie_word_embeddings: bool,
    /// Names of the classes of a classifier (`id2label` in `config.json`). Defaults to two classes.
    #[serde(skip)]
    pub labels: Vec<String>,
    /// `true` for gradient checkpointing: the activations of each layer are computed again in the backward instead of
    /// being kept. Not in `config.json`. Defaults to `false`.
    #[serde(skip)]
    pub recompute: bool,
    /// Other entries of `config.json`, which are written as they were read.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

impl Default for BertOptions {
    fn default() -> Self {
        Self {
            vocab_size: 30522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: Activation::Gelu,
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            pad_token_id: Some(0),
            classifier_dropout: None,
            problem_type: None,
            tie_word_embeddings: true,
            labels: numbered(2),
            recompute: false,
            others: Map::new(),
        }
    }
}

impl BertOptions {
    /// Sets the number of classes, which are named `LABEL_0` and so on (`num_labels`).
    #[must_use]
    pub fn with_classes(self, classes: usize) -> Self {
        Self { labels: numbered(classes), ..self }
    }

    fn classes(&self) -> i64 {
        i64::try_from(self.labels.len()).unwrap_or(i64::MAX)
    }
}

fn numbered(classes: usize) -> Vec<String> {
    (0..classes).map(|class| format!("LABEL_{class}")).collect()
}

impl TransformerOptions for BertOptions {
    const MODEL_TYPE: &'static str = "bert";

    fn from_config(mut config: Map<String, Value>) -> Result<Self, ConfigError> {
        if let Some(found) = config.remove("position_embedding_type")
            && found.as_str().is_some_and(|it| it != "absolute")
        {
            return Err(ConfigError::Positions { found: found.to_string(), known: "absolute" });
        }
        let decoder = [("is_decoder", false.into()), ("add_cross_attention", false.into())];
        config::refuse(&config, &decoder)?;
        let labels = labels(config.remove("id2label"), config.remove("num_labels"))?;
        config.remove("label2id");
        let options: Self = config::from_map(config, Self::MODEL_TYPE)?;
        Ok(Self { labels, ..options })
    }

    fn to_config(&self) -> Map<String, Value> {
        let mut config = config::to_map(self, Self::MODEL_TYPE);
        if self.labels != numbered(2) {
            let labels = || self.labels.iter().enumerate();
            let names: Map<_, _> =
                labels().map(|(id, name)| (id.to_string(), name.as_str().into())).collect();
            let ids: Map<_, _> = labels().map(|(id, name)| (name.clone(), id.into())).collect();
            config.insert("id2label".to_owned(), names.into());
            config.insert("label2id".to_owned(), ids.into());
        }
        config
    }
}

/// Returns the names of `id2label`, or else as many as `num_labels`.
fn labels(names: Option<Value>, number: Option<Value>) -> Result<Vec<String>, ConfigError> {
    let Some(Value::Object(names)) = names else {
        let number = number.and_then(|it| it.as_u64()).and_then(|it| usize::try_from(it).ok());
        return Ok(numbered(number.unwrap_or(2)));
    };
    let name = |id: usize| names.get(&id.to_string()).and_then(Value::as_str).map(str::to_owned);
    let found: Option<Vec<String>> = (0..names.len()).map(name).collect();
    found.ok_or_else(|| ConfigError::Json {
        reason: format!(
            "id2label does not name the classes 0 to {}",
            names.len().saturating_sub(1)
        ),
    })
}

/// BERT without a head (Devlin et al., 2018): from [`Tokens`] to hidden states `[batch, tokens, hidden_size]`.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `BertModel`, including the pooler.
#[derive(Debug)]
pub struct Bert {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
    encoder: Blocks<BertLayer>,
    pooler: Option<Linear>,
    context: Context,
    name: String,
    options: BertOptions,
}

/// Results of a forward for this rank's tokens.
struct BodyStates {
    hidden: Tensor,
    part: ContextPart,
    /// Weight of the word embedding for a tied head. `None` if this rank does not have the embedding.
    word_weight: Option<Tensor>,
}

impl Bert {
    /// Registers all layers below the path, including the pooler.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &BertOptions) -> Self {
        Self::with_pooler(path.borrow(), options, true)
    }

    fn with_pooler(path: &ParamPath<'_>, options: &BertOptions, pooler: bool) -> Self {
        let BertOptions { hidden_size, num_attention_heads: heads, pad_token_id, .. } = *options;
        if heads < 1 || hidden_size % heads != 0 {
            path.reject(format_args!(
                "num_attention_heads {heads} does not divide hidden_size {hidden_size}"
            ));
        }
        let embeddings = path / "embeddings";
        let words = EmbeddingOptions { padding: pad_token_id };
        let word_embeddings = Embedding::with_options(
            &embeddings / "word_embeddings",
            options.vocab_size,
            hidden_size,
            words,
        );
        let embedding = |name: &str, rows| Embedding::new(&embeddings / name, rows, hidden_size);
        let position_embeddings = embedding("position_embeddings", options.max_position_embeddings);
        let token_type_embeddings = embedding("token_type_embeddings", options.type_vocab_size);
        let norm = norm(&embeddings / "LayerNorm", options);
        let dropout = Dropout::maskless(&embeddings / "dropout", options.hidden_dropout_prob);
        let layers = path / "encoder" / "layer";
        let layers: Vec<_> = (0..options.num_hidden_layers)
            .map(|index| BertLayer::new(&(&layers / index), options))
            .collect();
        let pooler =
            pooler.then(|| Linear::new(path / "pooler" / "dense", hidden_size, hidden_size));
        // The layers have been initialised by their defaults before.
        init::draw_table(path, &word_embeddings, options.initializer_range, pad_token_id);
        for embedding in [&position_embeddings, &token_type_embeddings] {
            init::draw_table(path, embedding, options.initializer_range, None);
        }
        for layer in layers.iter().flat_map(BertLayer::linear).chain(&pooler) {
            init::draw(path, layer, options.initializer_range);
        }
        let probabilities = [options.hidden_dropout_prob, options.attention_probs_dropout_prob];
        Self {
            word_embeddings,
            position_embeddings,
            token_type_embeddings,
            norm,
            dropout,
            encoder: Blocks::new(
                &(path / "encoder" / "layer"),
                layers,
                options.recompute,
                &probabilities,
            ),
            pooler,
            context: Context::new(path, &probabilities),
            name: path.name().to_owned(),
            options: options.clone(),
        }
    }

    /// Returns the input of each layer and the output of the last: transformers' `output_hidden_states`.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    pub fn hidden_states<'t>(&self, tokens: impl Into<Tokens<'t>>) -> Result<Vec<Tensor>> {
        let mut seen = Vec::new();
        let last = self.run(tokens.into(), Some(&mut seen))?;
        seen.push(last);
        Ok(seen)
    }

    /// Computes `pooler_output` `[batch, hidden_size]` from hidden states `[batch, tokens, hidden_size]`: those of the
    /// first token, with a linear layer and tanh if the model has a pooler.
    ///
    /// # Errors
    /// Returns an error of libtorch.
    pub fn pooled(&self, hidden: &Tensor) -> Result<Tensor> {
        let first = hidden.f_select(1, 0)?;
        match &self.pooler {
            Some(pooler) => Ok(pooler.forward(&first)?.f_tanh()?),
            None => Ok(first),
        }
    }

    fn run(&self, tokens: Tokens<'_>, seen: Option<&mut Vec<Tensor>>) -> Result<Tensor> {
        let own = self.own_states(tokens, seen)?;
        own.part.gather(&own.hidden, 1)
    }

    /// Returns the output for this rank's tokens.
    fn own_states(&self, tokens: Tokens<'_>, seen: Option<&mut Vec<Tensor>>) -> Result<BodyStates> {
        tokens.checked_size(0, self.options.max_position_embeddings)?;
        let own = self.context.bidirectional(&tokens)?;
        let shared = Shared::new(own.mask, None, own.part);
        let mut word_weight = None;
        let hidden = self.context.run(&shared.part, &own.ids, || {
            let embedded = || {
                let positions = (&self.position_embeddings, &own.positions);
                let (words, types) = (&self.word_embeddings, &self.token_type_embeddings);
                let (hidden, weight) = match &own.token_type_ids {
                    Some(ids) => words.forward_sum(&own.ids, &[(types, ids), positions], None)?,
                    // All tokens belong to the first text: one row, looked up once.
                    None => {
                        let first = Tensor::f_zeros([1, 1], (tch::Kind::Int64, own.ids.device()))?;
                        words.forward_sum(&own.ids, &[positions, (types, &first)], None)?
                    }
                };
                word_weight = Some(weight);
                self.dropout.forward(&self.norm.forward(&hidden)?)
            };
            self.encoder.forward(embedded, &shared, None, seen)
        })?;
        Ok(BodyStates { hidden, part: shared.part, word_weight })
    }

    fn full(&self, name: &str) -> String {
        full_name(&self.name, name)
    }
}

impl<'t, I: Into<Tokens<'t>>> Module<I> for Bert {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        self.run(tokens.into(), None)
    }
}

impl LayerGroups for Bert {
    /// Groups the parameters: the embeddings, each layer, and the pooler.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let layers = (0..self.options.num_hidden_layers)
            .map(|index| vec![self.full(&format!("encoder.layer.{index}"))]);
        let pooler = self.pooler.iter().map(|_| vec![self.full("pooler")]);
        [vec![self.full("embeddings")]].into_iter().chain(layers).chain(pooler).collect()
    }
}

impl TensorParallelPlan for Bert {
    /// Divides attention by heads, the feed-forward layers by their inner features, and the word embedding by the
    /// vocabulary. The pooler is whole on every rank.
    fn tensor_plan() -> TensorPlan {
        TensorPlan::new()
            .vocabulary("*embeddings.word_embeddings.weight")
            .column("*attention.self.query.weight")
            .column("*attention.self.key.weight")
            .column("*attention.self.value.weight")
            .row("*attention.output.dense.weight")
            .column("*intermediate.dense.weight")
            .row("*output.dense.weight")
            .optional()
    }
}

impl Transformer for Bert {
    type Options = BertOptions;

    const ARCHITECTURE: &'static str = "BertModel";
    const BODY: &'static str = BODY;
    const EMBEDDING: &'static str = EMBEDDING;

    fn build(path: &ParamPath<'_>, options: &BertOptions) -> Self {
        Self::new(path, options)
    }

    fn options(&self) -> &BertOptions {
        &self.options
    }

    fn is_optional(name: &str) -> bool {
        name.starts_with(POOLER)
    }
}

const BODY: &str = "bert";
const EMBEDDING: &str = "embeddings.word_embeddings.weight";
/// Prefix of the pooler, which the weights of a language model lack.
const POOLER: &str = "bert.pooler.";

fn norm<'a>(path: impl Borrow<ParamPath<'a>>, options: &BertOptions) -> LayerNorm {
    let norm = LayerNormOptions { eps: options.layer_norm_eps, ..LayerNormOptions::default() };
    LayerNorm::with_options(path, &[options.hidden_size], norm)
}
