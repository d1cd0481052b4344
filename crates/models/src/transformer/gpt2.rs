//! GPT-2, after Hugging Face's transformers.

use std::borrow::Borrow;

use brigade_nn::{
    Branch, ContextPart, Dropout, Embedding, LayerGroups, LayerNorm, LayerNormOptions, Module,
    ParamPath, TensorParallelPlan, Training,
};
use brigade_sharding::{Heads, Inference, TensorPlan};
use brigade_torch::{Activation, Error, ResidualNorm, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::attention::{OwnHeads, Shared, attend, split_heads};
use super::blocks::{Block, Blocks};
use super::cache::LayerCache;
use super::causal_lm::{CausalBody, CausalLm, HeadInput};
use super::config::{ConfigError, TransformerOptions};
use super::context::Context;
use super::conv1d::Conv1D;
use super::{KeyValueCache, Tokens, Transformer, config, full_name};
use crate::init::{Redraw, redraw};
use crate::residual::Residual;

/// Options of a [`Gpt2`], under the names of transformers' `GPT2Config`. The defaults are those of the small model with
/// 124 million parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpt2Options {
    /// Vocabulary size. Defaults to 50257.
    pub vocab_size: i64,
    /// Maximum sequence length in tokens. Defaults to 1024.
    #[serde(alias = "max_position_embeddings")]
    pub n_positions: i64,
    /// Hidden size: the width of each token's embedding. Defaults to 768.
    #[serde(alias = "hidden_size")]
    pub n_embd: i64,
    /// Number of transformer blocks. Defaults to 12.
    #[serde(alias = "num_hidden_layers")]
    pub n_layer: usize,
    /// Number of attention heads, a divisor of the hidden size. Defaults to 12.
    #[serde(alias = "num_attention_heads")]
    pub n_head: i64,
    /// Intermediate size: the width inside each feed-forward layer. Defaults to 4 `n_embd`.
    pub n_inner: Option<i64>,
    /// Activation of the feed-forward layers. Defaults to [`Activation::GeluTanh`].
    #[serde(with = "config::activation")]
    pub activation_function: Activation,
    /// Dropout probability of the residual branches. Defaults to 0.1.
    pub resid_pdrop: f64,
    /// Dropout probability of the embeddings. Defaults to 0.1.
    pub embd_pdrop: f64,
    /// Dropout probability of the attention weights. Defaults to 0.1.
    pub attn_pdrop: f64,
    /// Epsilon of the layer norms. Defaults to 1e-5.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of the initial weights. Defaults to 0.02.
    pub initializer_range: f64,
    /// Divides the attention scores by the square root of a head's width. Defaults to `true`.
    pub scale_attn_weights: bool,
    /// Divides the attention scores by the block's number (from 1) too. Defaults to `false`.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Ties the head's weight to the embedding. Defaults to `true`.
    pub tie_word_embeddings: bool,
    /// Id of the token at the beginning of a text. Defaults to 50256.
    pub bos_token_id: Option<i64>,
    /// Ids of the tokens that end a text. Defaults to 50256.
    #[serde(with = "config::token_ids")]
    pub eos_token_id: Vec<i64>,
    /// Id of the padding token. Defaults to `None`: no padding token.
    pub pad_token_id: Option<i64>,
    /// `true` for gradient checkpointing: the activations of each block are computed again in the backward instead of
    /// being kept. Not in `config.json`. Defaults to `false`.
    #[serde(skip)]
    pub recompute: bool,
    /// Other entries of `config.json`, which are written as they were read.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

impl Default for Gpt2Options {
    fn default() -> Self {
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: Activation::GeluTanh,
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            tie_word_embeddings: true,
            bos_token_id: Some(50256),
            eos_token_id: vec![50256],
            pad_token_id: None,
            recompute: false,
            others: Map::new(),
        }
    }
}

impl TransformerOptions for Gpt2Options {
    const MODEL_TYPE: &'static str = "gpt2";

    fn from_config(config: Map<String, Value>) -> Result<Self, ConfigError> {
        config::refuse(&config, &[("add_cross_attention", false.into())])?;
        config::from_map(config, Self::MODEL_TYPE)
    }

    fn to_config(&self) -> Map<String, Value> {
        config::to_map(self, Self::MODEL_TYPE)
    }

    fn inference(&self, samples: u64, tokens: u64, kind: Kind) -> Option<Inference> {
        let sizes = [self.n_layer as i64, self.n_embd, self.vocab_size];
        config::inference_of(sizes, [samples, tokens], kind)
    }
}

/// GPT-2 without a head (Radford et al., 2019): from [`Tokens`] to hidden states `[batch, tokens, n_embd]`.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `GPT2Model`.
#[derive(Debug)]
pub struct Gpt2 {
    wte: Embedding,
    wpe: Embedding,
    drop: Dropout,
    h: Blocks<Gpt2Block>,
    ln_f: LayerNorm,
    context: Context,
    name: String,
    options: Gpt2Options,
}

impl Gpt2 {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &Gpt2Options) -> Self {
        let path = path.borrow();
        let Gpt2Options { n_embd, n_head, initializer_range, .. } = *options;
        if n_head < 1 || n_embd % n_head != 0 {
            path.reject(format_args!("n_head {n_head} does not divide n_embd {n_embd}"));
        }
        let wte = Embedding::new(path / "wte", options.vocab_size, n_embd);
        let wpe = Embedding::new(path / "wpe", options.n_positions, n_embd);
        let drop = Dropout::maskless(path / "drop", options.embd_pdrop);
        let blocks: Vec<_> = (0..options.n_layer)
            .map(|index| Gpt2Block::new(&(path / "h" / index), options, index))
            .collect();
        let ln_f = norm(path / "ln_f", options);
        // The layers have been initialised by their defaults before.
        let normal = Redraw::Normal(initializer_range);
        redraw(path, wte.weight(), normal);
        redraw(path, wpe.weight(), normal);
        for block in &blocks {
            block.redraw(path, options);
        }
        let dropout = [options.embd_pdrop, options.resid_pdrop, options.attn_pdrop];
        let h = Blocks::new(&(path / "h"), blocks, options.recompute, &dropout);
        let (context, name) = (Context::new(path, &dropout), path.name().to_owned());
        Self { wte, wpe, drop, h, ln_f, context, name, options: options.clone() }
    }

    /// Returns the input of each block and the normalised output of the last one: transformers' `output_hidden_states`.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    pub fn hidden_states<'t>(&self, tokens: impl Into<Tokens<'t>>) -> Result<Vec<Tensor>> {
        let mut seen = Vec::new();
        let last = self.run(tokens.into(), None, Some(&mut seen))?;
        seen.push(last);
        Ok(seen)
    }

    /// Computes the hidden states of tokens that follow those in the cache, and adds their keys and values to the
    /// cache.
    ///
    /// # Errors
    /// Returns the errors of the forward, and fails for more tokens than positions.
    pub fn forward_cached(&self, tokens: Tokens<'_>, cache: &mut KeyValueCache) -> Result<Tensor> {
        self.run(tokens, Some(cache), None)
    }
}

impl Gpt2 {
    /// Returns the output for this rank's tokens.
    fn own_states(
        &self,
        tokens: Tokens<'_>,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<HeadInput> {
        let past = cache.as_deref().map_or(0, KeyValueCache::past);
        tokens.checked_size(past, self.options.n_positions)?;
        let own = self.context.causal(&tokens, past, cache.as_deref())?;
        let shared = Shared::new(own.mask, None, own.part);
        let mut tied_weight = None;
        let hidden = self.context.run(&shared.part, &own.ids, || {
            let embedded = || {
                let mut others = vec![(&self.wpe, &own.positions)];
                others.extend(own.token_type_ids.as_ref().map(|types| (&self.wte, types)));
                let (hidden, weight) = self.wte.forward_sum(&own.ids, &others, Some(&self.drop))?;
                tied_weight = self.options.tie_word_embeddings.then_some(weight);
                Ok(hidden)
            };
            let (hidden, _) = self.h.forward_routed(embedded, &shared, cache, seen)?;
            Ok(hidden.layer_norm(&self.ln_f)?.normed)
        })?;
        Ok(HeadInput { hidden, part: shared.part, loss: None, tied_weight })
    }
}

impl<'t, I: Into<Tokens<'t>>> Module<I> for Gpt2 {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        self.run(tokens.into(), None, None)
    }
}

impl LayerGroups for Gpt2 {
    /// Groups the parameters: the embeddings, each block, and the last normalisation.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let full = |name: &str| full_name(&self.name, name);
        let blocks = (0..self.options.n_layer).map(|index| vec![full(&format!("h.{index}"))]);
        let embeddings = vec![full("wte"), full("wpe")];
        [embeddings].into_iter().chain(blocks).chain([vec![full("ln_f")]]).collect()
    }
}

impl Transformer for Gpt2 {
    type Options = Gpt2Options;

    const ARCHITECTURE: &'static str = "GPT2Model";
    const BODY: &'static str = "transformer";
    const EMBEDDING: &'static str = "wte.weight";

    fn build(path: &ParamPath<'_>, options: &Gpt2Options) -> Self {
        Self::new(path, options)
    }

    fn options(&self) -> &Gpt2Options {
        &self.options
    }
}

impl TensorParallelPlan for Gpt2 {
    /// Divides attention by heads, the feed-forward layers by their inner features, and the token embedding by the
    /// vocabulary.
    fn tensor_plan() -> TensorPlan {
        TensorPlan::new()
            .vocabulary("*wte.weight")
            .heads("*attn.c_attn.weight", Heads::fused(3))
            .row("*attn.c_proj.weight")
            .column("*mlp.c_fc.weight")
            .row("*mlp.c_proj.weight")
            .optional()
    }
}

impl CausalBody for Gpt2 {
    const LANGUAGE_MODEL: &'static str = "GPT2LMHeadModel";

    fn run(
        &self,
        tokens: Tokens<'_>,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor> {
        let own = self.own_states(tokens, cache, seen)?;
        own.part.gather(&own.hidden, 1)
    }

    fn run_part(&self, tokens: Tokens<'_>) -> Result<(Tensor, ContextPart)> {
        let own = self.own_states(tokens, None, None)?;
        Ok((own.hidden, own.part))
    }

    fn run_for_head(&self, tokens: Tokens<'_>) -> Result<HeadInput> {
        self.own_states(tokens, None, None)
    }

    fn max_tokens(&self) -> Option<i64> {
        Some(self.options.n_positions)
    }

    fn head_shape(&self) -> [i64; 2] {
        [self.options.vocab_size, self.options.n_embd]
    }

    fn initializer_range(&self) -> f64 {
        self.options.initializer_range
    }

    fn tied_embedding(&self) -> Option<&Embedding> {
        self.options.tie_word_embeddings.then_some(&self.wte)
    }
}

/// GPT-2 as a language model: from [`Tokens`] to logits `[batch, tokens, vocab_size]` of the next token.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `GPT2LMHeadModel`; the head's weight is
/// tied to the embedding.
///
/// ```
/// use brigade_models::{Gpt2LmHead, Gpt2Options};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 2, ..Default::default() };
/// let model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 8, 9]).view([1, 3]);
/// assert_eq!(model.forward(&ids)?.size(), [1, 3, 50]);
/// // Each token is to be predicted from those before it, without all logits at once.
/// let loss = model.module().loss(&ids, &ids, 0.0)?;
/// assert_eq!(loss.count.int64_value(&[]), 2);
/// loss.mean()?.backward();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub type Gpt2LmHead = CausalLm<Gpt2>;

/// Attention and a feed-forward layer, each after a normalisation and with a residual connection.
#[derive(Debug)]
struct Gpt2Block {
    ln_1: LayerNorm,
    c_attn: Conv1D,
    c_proj: Conv1D,
    training: Training,
    resid_dropout: Dropout,
    ln_2: LayerNorm,
    c_fc: Conv1D,
    mlp_c_proj: Conv1D,
    mlp_dropout: Dropout,
    activation: Activation,
    heads: OwnHeads,
    dropout: f64,
    scale: f64,
}

impl Gpt2Block {
    fn new(path: &ParamPath<'_>, options: &Gpt2Options, index: usize) -> Self {
        let Gpt2Options { n_embd: width, n_head: heads, .. } = *options;
        let inner = options.n_inner.unwrap_or(4 * width);
        let (attention, mlp) = (path / "attn", path / "mlp");
        let mut scale = if options.scale_attn_weights {
            ((width / heads.max(1)) as f64).sqrt().recip()
        } else {
            1.0
        };
        if options.scale_attn_by_inverse_layer_idx {
            scale /= (index + 1) as f64;
        }
        if !(0.0..1.0).contains(&options.attn_pdrop) {
            path.reject(format_args!("attn_pdrop {} is not in [0, 1)", options.attn_pdrop));
        }
        // Layers are registered and initialised in transformers' order.
        let ln_1 = norm(path / "ln_1", options);
        let c_attn = Conv1D::new(&attention / "c_attn", width, 3 * width);
        let heads = OwnHeads::new(&attention, heads, c_attn.divided(), &[]);
        Self {
            ln_1,
            c_attn,
            c_proj: Conv1D::new(&attention / "c_proj", width, width),
            training: (&attention / "attn_dropout").training(),
            resid_dropout: Dropout::maskless(&attention / "resid_dropout", options.resid_pdrop),
            ln_2: norm(path / "ln_2", options),
            c_fc: Conv1D::new(&mlp / "c_fc", width, inner),
            mlp_c_proj: Conv1D::new(&mlp / "c_proj", inner, width),
            mlp_dropout: Dropout::maskless(&mlp / "dropout", options.resid_pdrop),
            activation: options.activation_function,
            heads,
            dropout: options.attn_pdrop,
            scale,
        }
    }

    /// Draws the weights again in the order of transformers' `_init_weights`: those of the output projections are drawn
    /// twice, the second time with a smaller standard deviation.
    fn redraw(&self, path: &ParamPath<'_>, options: &Gpt2Options) {
        let normal = Redraw::Normal(options.initializer_range);
        let depth = (2 * options.n_layer) as f64;
        let smaller = Redraw::Normal(options.initializer_range / depth.sqrt());
        for (first, last) in [(&self.c_attn, &self.c_proj), (&self.c_fc, &self.mlp_c_proj)] {
            redraw(path, first.weight(), normal);
            redraw(path, last.weight(), normal);
            redraw(path, last.weight(), smaller);
        }
    }

    fn attend(
        &self,
        input: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Branch> {
        let parts = self.c_attn.forward(input)?.f_split(self.c_attn.outputs() / 3, -1)?;
        let [queries, keys, values] = parts.as_slice() else {
            return Err(Error::invalid_argument("attention needs queries, keys and values"));
        };
        let heads = self.heads.count;
        let queries = split_heads(queries, heads)?;
        let (keys, values) = (split_heads(keys, heads)?, split_heads(values, heads)?);
        let (keys, values) = match cache {
            Some(cache) => cache.extend(&keys, &values)?,
            None => (keys, values),
        };
        let dropout = if self.training.is_on() { self.dropout } else { 0.0 };
        let attended = attend(
            [&queries, &keys, &values],
            shared,
            dropout,
            Some(self.scale),
            &self.heads.region,
        )?;
        shared.seeded(self.c_proj.forward_branch(&attended, &self.resid_dropout)?, 0)
    }
}

impl Block for Gpt2Block {
    fn forward(
        &self,
        hidden: &Residual,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Residual> {
        let ResidualNorm { stream, normed } = hidden.layer_norm(&self.ln_1)?;
        let attended = self.attend(&normed, shared, cache)?;
        let ResidualNorm { stream, normed } =
            self.ln_2.forward_residual(&stream, Some(&attended))?;
        let (first, second, dropout) = (&self.c_fc, &self.mlp_c_proj, &self.mlp_dropout);
        let branch = if shared.leaves_biases {
            first.forward_feed_forward_branch(&normed, self.activation, second, dropout)?
        } else {
            dropout.branch(first.forward_feed_forward(&normed, self.activation, second)?)?
        };
        Ok(Residual::with_branch(stream, shared.seeded(branch, 1)?))
    }
}

fn norm<'a>(path: impl Borrow<ParamPath<'a>>, options: &Gpt2Options) -> LayerNorm {
    let norm = LayerNormOptions { eps: options.layer_norm_epsilon, ..LayerNormOptions::default() };
    LayerNorm::with_options(path, &[options.n_embd], norm)
}
