//! Options of a Llama.

use brigade_nn::ParamPath;
use brigade_sharding::Inference;
use brigade_torch::Activation;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::super::config::{self, ConfigError, TransformerOptions};
use super::super::rotary::Llama3Scaling;
use super::super::rotated_attention::RotatedAttentionOptions;

/// Options of a [`super::Llama`], under the names of transformers' `LlamaConfig`. The defaults are those of Llama 7B.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LlamaOptions {
    /// Vocabulary size. Defaults to 32000.
    pub vocab_size: i64,
    /// Hidden size: the width of each token's embedding. Defaults to 4096.
    pub hidden_size: i64,
    /// Intermediate size: the width inside each feed-forward layer. Defaults to 11008.
    pub intermediate_size: i64,
    /// Number of layers. Defaults to 32.
    pub num_hidden_layers: usize,
    /// Number of attention heads: heads of the queries. Defaults to 32.
    pub num_attention_heads: i64,
    /// Number of key-value heads, a divisor of `num_attention_heads`. Defaults to `None`: `num_attention_heads`.
    pub num_key_value_heads: Option<i64>,
    /// Width of an attention head. Defaults to `hidden_size / num_attention_heads`.
    pub head_dim: Option<i64>,
    /// Activation of the feed-forward layers' gate. Defaults to [`Activation::Silu`].
    #[serde(with = "config::activation")]
    pub hidden_act: Activation,
    /// Maximum sequence length in training, in tokens. Longer texts can be computed, too. Defaults to 2048.
    pub max_position_embeddings: i64,
    /// Standard deviation of the initial weights. Defaults to 0.02.
    pub initializer_range: f64,
    /// Epsilon of the RMS norms. Defaults to 1e-6.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding's frequencies: the longest wavelength divided by 2π. Defaults to 10000. In
    /// `config.json` it is in `rope_parameters`.
    #[serde(skip)]
    pub rope_theta: f64,
    /// Scaling of the rotary embedding for longer texts. Defaults to none. In `config.json` it is in `rope_parameters`,
    /// in older files in `rope_scaling`.
    #[serde(skip)]
    pub rope_scaling: Option<Llama3Scaling>,
    /// Adds biases to the linear layers of attention. Defaults to `false`.
    pub attention_bias: bool,
    /// Adds biases to the feed-forward layers. Defaults to `false`.
    pub mlp_bias: bool,
    /// Dropout probability of the attention weights. Defaults to 0.
    pub attention_dropout: f64,
    /// Ties the head's weight to the embedding. Defaults to `false`.
    pub tie_word_embeddings: bool,
    /// Id of the padding token, whose embedding is not trained. Defaults to none.
    pub pad_token_id: Option<i64>,
    /// Id of the token at the beginning of a text. Defaults to 1.
    pub bos_token_id: Option<i64>,
    /// Ids of the tokens that end a text. Defaults to 2.
    #[serde(with = "config::token_ids")]
    pub eos_token_id: Vec<i64>,
    /// `true` for gradient checkpointing: the activations of each layer are computed again in the backward instead of
    /// being kept. Not in `config.json`. Defaults to `false`.
    #[serde(skip)]
    pub recompute: bool,
    /// Other entries of `config.json`, which are written as they were read.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

impl Default for LlamaOptions {
    fn default() -> Self {
        Self {
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: None,
            head_dim: None,
            hidden_act: Activation::Silu,
            max_position_embeddings: 2048,
            initializer_range: 0.02,
            rms_norm_eps: 1e-6,
            rope_theta: ROPE_THETA,
            rope_scaling: None,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            tie_word_embeddings: false,
            pad_token_id: None,
            bos_token_id: Some(1),
            eos_token_id: vec![2],
            recompute: false,
            others: Map::new(),
        }
    }
}

const ROPE_THETA: f64 = 10_000.0;

impl LlamaOptions {
    /// Returns the head size.
    pub(super) fn head_width(&self) -> i64 {
        self.head_dim.unwrap_or_else(|| self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns the number of key-value heads.
    pub(super) fn key_heads(&self) -> i64 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Returns the sizes of attention.
    pub(super) fn attention(&self) -> RotatedAttentionOptions {
        RotatedAttentionOptions {
            width: self.hidden_size,
            heads: self.num_attention_heads,
            key_heads: self.key_heads(),
            head_width: self.head_width(),
            bias: self.attention_bias,
            dropout: self.attention_dropout,
        }
    }

    /// Records errors for sizes that cannot be built.
    pub(super) fn check(&self, path: &ParamPath<'_>) {
        self.attention().check(path, self.head_dim.is_some());
    }
}

impl TransformerOptions for LlamaOptions {
    const MODEL_TYPE: &'static str = "llama";

    fn from_config(mut config: Map<String, Value>) -> Result<Self, ConfigError> {
        let (theta, rope_scaling) = take_rope(&mut config)?;
        let options: Self = config::from_map(config, Self::MODEL_TYPE)?;
        Ok(Self { rope_theta: theta.unwrap_or(ROPE_THETA), rope_scaling, ..options })
    }

    fn to_config(&self) -> Map<String, Value> {
        let mut config = config::to_map(self, Self::MODEL_TYPE);
        insert_rope(&mut config, self.rope_theta, self.rope_scaling);
        config
    }

    fn inference(&self, samples: u64, tokens: u64, kind: Kind) -> Option<Inference> {
        let key_width = self.attention().key_heads.saturating_mul(self.head_width());
        let sizes = [self.num_hidden_layers as i64, key_width, self.vocab_size];
        config::inference_of(sizes, [samples, tokens], kind)
    }
}

/// Reads the rotary embedding's options from a config, in the newer or the older form.
pub(in super::super) fn take_rope(
    config: &mut Map<String, Value>,
) -> Result<(Option<f64>, Option<Llama3Scaling>), ConfigError> {
    let old_theta = config.remove("rope_theta");
    let old = config.remove("rope_scaling");
    let rope = [config.remove("rope_parameters"), old];
    let (theta, scaling) = read_rope(rope.into_iter().flatten().find(|it| !it.is_null()))?;
    Ok((theta.or_else(|| old_theta.as_ref().and_then(Value::as_f64)), scaling))
}

/// Inserts the settings of the rotary embedding into a config.
pub(in super::super) fn insert_rope(
    config: &mut Map<String, Value>,
    theta: f64,
    scaling: Option<Llama3Scaling>,
) {
    let mut rope = match scaling.map(serde_json::to_value) {
        Some(Ok(Value::Object(scaling))) => scaling,
        _ => Map::new(),
    };
    let rope_type = if scaling.is_some() { "llama3" } else { "default" };
    rope.insert("rope_type".to_owned(), rope_type.into());
    rope.insert("rope_theta".to_owned(), theta.into());
    config.insert("rope_parameters".to_owned(), rope.into());
}

fn read_rope(rope: Option<Value>) -> Result<(Option<f64>, Option<Llama3Scaling>), ConfigError> {
    let Some(rope) = rope else { return Ok((None, None)) };
    let text = |key| rope.get(key).and_then(Value::as_str);
    let found = text("rope_type").or_else(|| text("type")).unwrap_or("default").to_owned();
    if let Some(factor) = rope.get("partial_rotary_factor").filter(|it| it.as_f64() != Some(1.0)) {
        let value = factor.to_string();
        return Err(ConfigError::Unsupported { key: "partial_rotary_factor", value });
    }
    let theta = rope.get("rope_theta").and_then(Value::as_f64);
    match found.as_str() {
        "default" => Ok((theta, None)),
        "llama3" => {
            let scaling = serde_json::from_value(rope).map_err(|error| ConfigError::Json {
                reason: format!("rope parameters: {error}"),
            })?;
            Ok((theta, Some(scaling)))
        }
        _ => Err(ConfigError::Positions { found, known: "default and llama3" }),
    }
}
