//! Options of a Mixtral.

use brigade_nn::ParamPath;
use brigade_sharding::Inference;
use brigade_torch::Activation;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::super::config::{self, ConfigError, TransformerOptions};
use super::super::llama::options::{insert_rope, take_rope};
use super::super::rotary::Llama3Scaling;
use super::super::rotated_attention::RotatedAttentionOptions;

/// Options of a [`super::Mixtral`], under the names of transformers' `MixtralConfig`. The defaults are those of Mixtral
/// 8x7B.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MixtralOptions {
    /// Vocabulary size. Defaults to 32000.
    pub vocab_size: i64,
    /// Hidden size: the width of each token's embedding. Defaults to 4096.
    pub hidden_size: i64,
    /// Intermediate size: the width inside each expert. Defaults to 14336.
    pub intermediate_size: i64,
    /// Number of layers. Defaults to 32.
    pub num_hidden_layers: usize,
    /// Number of attention heads: heads of the queries. Defaults to 32.
    pub num_attention_heads: i64,
    /// Number of key-value heads, a divisor of `num_attention_heads`; `None` stands for `num_attention_heads`. Defaults
    /// to 8.
    pub num_key_value_heads: Option<i64>,
    /// Width of an attention head. Defaults to `hidden_size / num_attention_heads`.
    pub head_dim: Option<i64>,
    /// Activation of the experts' gates. Defaults to [`Activation::Silu`].
    #[serde(with = "config::activation")]
    pub hidden_act: Activation,
    /// Maximum sequence length in training, in tokens. Longer texts can be computed, too. Defaults to 131072.
    pub max_position_embeddings: i64,
    /// Standard deviation of the initial weights. Defaults to 0.02.
    pub initializer_range: f64,
    /// Epsilon of the RMS norms. Defaults to 1e-5.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding's frequencies: the longest wavelength divided by 2π. Defaults to 1000000. In
    /// `config.json` it is in `rope_parameters`.
    #[serde(skip)]
    pub rope_theta: f64,
    /// Scaling of the rotary embedding for longer texts. Defaults to none. In `config.json` it is in `rope_parameters`,
    /// in older files in `rope_scaling`.
    #[serde(skip)]
    pub rope_scaling: Option<Llama3Scaling>,
    /// Sliding window: the number of tokens, including itself, to which a token attends. Defaults to none: a token
    /// attends to all earlier ones.
    pub sliding_window: Option<i64>,
    /// Dropout probability of the attention weights. Defaults to 0.
    pub attention_dropout: f64,
    /// Number of experts of each layer. Defaults to 8.
    pub num_local_experts: i64,
    /// Number of experts for each token (top-k). Defaults to 2.
    pub num_experts_per_tok: i64,
    /// `true` to add the load-balancing loss of the routers to the loss. Defaults to `false`, as in published configs;
    /// set it for training.
    pub output_router_logits: bool,
    /// Coefficient of the load-balancing loss. Defaults to 0.001.
    pub router_aux_loss_coef: f64,
    /// Jitter noise: in training the inputs of experts are multiplied by random numbers that differ from 1 by at most
    /// this. Defaults to 0.
    pub router_jitter_noise: f64,
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

const ROPE_THETA: f64 = 1e6;

impl Default for MixtralOptions {
    fn default() -> Self {
        Self {
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 14336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: Some(8),
            head_dim: None,
            hidden_act: Activation::Silu,
            max_position_embeddings: 4096 * 32,
            initializer_range: 0.02,
            rms_norm_eps: 1e-5,
            rope_theta: ROPE_THETA,
            rope_scaling: None,
            sliding_window: None,
            attention_dropout: 0.0,
            num_local_experts: 8,
            num_experts_per_tok: 2,
            output_router_logits: false,
            router_aux_loss_coef: 0.001,
            router_jitter_noise: 0.0,
            tie_word_embeddings: false,
            pad_token_id: None,
            bos_token_id: Some(1),
            eos_token_id: vec![2],
            recompute: false,
            others: Map::new(),
        }
    }
}

impl MixtralOptions {
    /// Returns the head size.
    pub(super) fn head_width(&self) -> i64 {
        self.head_dim.unwrap_or_else(|| self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns the sizes of attention.
    pub(super) fn attention(&self) -> RotatedAttentionOptions {
        RotatedAttentionOptions {
            width: self.hidden_size,
            heads: self.num_attention_heads,
            key_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_width: self.head_width(),
            bias: false,
            dropout: self.attention_dropout,
        }
    }

    /// Records errors for sizes that cannot be built; the experts record their own.
    pub(super) fn check(&self, path: &ParamPath<'_>) {
        self.attention().check(path, self.head_dim.is_some());
        if let Some(window) = self.sliding_window.filter(|&window| window < 1) {
            path.reject(format_args!("expected a sliding_window of at least 1, found {window}"));
        }
    }
}

impl TransformerOptions for MixtralOptions {
    const MODEL_TYPE: &'static str = "mixtral";

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
