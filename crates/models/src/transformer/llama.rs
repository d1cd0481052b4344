//! Llama, after Hugging Face's transformers.

mod layer;
pub(super) mod options;

use std::borrow::Borrow;

use brigade_nn::{
    ContextPart, Embedding, EmbeddingOptions, LayerGroups, Module, ParamPath, RmsNorm,
    TensorParallelPlan,
};
use brigade_sharding::TensorPlan;
use brigade_torch::{Error, Result};
use tch::Tensor;

use self::layer::LlamaLayer;
pub use self::options::LlamaOptions;
use super::attention::Shared;
use super::blocks::Blocks;
use super::causal_lm::{CausalBody, CausalLm, HeadInput};
use super::context::Context;
use super::rotary::Rotary;
use super::{KeyValueCache, Tokens, Transformer};

/// Llama without a head (Touvron et al., 2023; versions 1 to 3): from [`Tokens`] to hidden states `[batch, tokens,
/// hidden_size]`. It has rotary position embeddings (RoPE) and grouped-query attention.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `LlamaModel`.
#[derive(Debug)]
pub struct Llama {
    embed_tokens: Embedding,
    layers: Blocks<LlamaLayer>,
    norm: RmsNorm,
    rotary: Rotary,
    context: Context,
    name: String,
    options: LlamaOptions,
}

impl Llama {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &LlamaOptions) -> Self {
        let path = path.borrow();
        options.check(path);
        let width = options.hidden_size;
        let embed_tokens = Embedding::with_options(
            path / "embed_tokens",
            options.vocab_size,
            width,
            EmbeddingOptions { padding: options.pad_token_id },
        );
        let layers = path / "layers";
        let layers: Vec<_> = (0..options.num_hidden_layers)
            .map(|index| LlamaLayer::new(&(&layers / index), options))
            .collect();
        let norm = RmsNorm::new(path / "norm", width, options.rms_norm_eps);
        // The layers have been initialised by their defaults before.
        let padding = options.pad_token_id;
        super::init::draw_table(path, &embed_tokens, options.initializer_range, padding);
        for layer in layers.iter().flat_map(LlamaLayer::linear) {
            super::init::draw(path, layer, options.initializer_range);
        }
        Self {
            embed_tokens,
            layers: Blocks::new(
                &(path / "layers"),
                layers,
                options.recompute,
                &[options.attention_dropout],
            ),
            norm,
            rotary: Rotary::new(
                options.head_width(),
                options.rope_theta,
                options.rope_scaling.as_ref(),
            ),
            context: Context::new(path, &[options.attention_dropout]),
            name: path.name().to_owned(),
            options: options.clone(),
        }
    }

    /// Returns the input of each layer and the normalised output of the last: transformers'
    /// `output_hidden_states`.
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
    /// Returns the errors of the forward.
    pub fn forward_cached(&self, tokens: Tokens<'_>, cache: &mut KeyValueCache) -> Result<Tensor> {
        self.run(tokens, Some(cache), None)
    }
}

impl Llama {
    /// Returns the output for this rank's tokens.
    fn own_states(
        &self,
        tokens: Tokens<'_>,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<HeadInput> {
        let past = cache.as_deref().map_or(0, KeyValueCache::past);
        // Rotary embeddings have no maximum position, but quality drops beyond the sequence length of the training.
        tokens.checked_size(past, i64::MAX)?;
        if tokens.token_type_ids.is_some() {
            return Err(Error::invalid_argument("Llama has no token types: give ids and a mask"));
        }
        let own = self.context.causal(&tokens, past, cache.as_deref())?;
        let part = own.part;
        let mut tied_weight = None;
        let hidden = self.context.run(&part, &own.ids, || {
            let embedded = || {
                let (words, weight) = self.embed_tokens.forward_tied(&own.ids)?;
                tied_weight = self.options.tie_word_embeddings.then_some(weight);
                Ok(words)
            };
            let kind = self.embed_tokens.weight().kind();
            let rotation = Some(self.rotary.at(&own.positions, kind)?);
            let shared = Shared::new(own.mask, rotation, part.clone());
            let (hidden, _) = self.layers.forward_routed(embedded, &shared, cache, seen)?;
            Ok(hidden.rms_norm(&self.norm)?.normed)
        })?;
        Ok(HeadInput { hidden, part, loss: None, tied_weight })
    }
}

impl<'t, I: Into<Tokens<'t>>> Module<I> for Llama {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        self.run(tokens.into(), None, None)
    }
}

impl LayerGroups for Llama {
    /// Groups the parameters: the embedding, each layer, and the last normalisation.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let full = |name: &str| super::full_name(&self.name, name);
        let layers =
            (0..self.options.num_hidden_layers).map(|index| vec![full(&format!("layers.{index}"))]);
        let embedding = vec![full("embed_tokens")];
        [embedding].into_iter().chain(layers).chain([vec![full("norm")]]).collect()
    }
}

impl TensorParallelPlan for Llama {
    /// Divides attention by heads, the feed-forward layers by their inner features, and the embedding by the
    /// vocabulary.
    fn tensor_plan() -> TensorPlan {
        TensorPlan::new()
            .vocabulary("*embed_tokens.weight")
            .column("*self_attn.q_proj.weight")
            .column("*self_attn.k_proj.weight")
            .column("*self_attn.v_proj.weight")
            .row("*self_attn.o_proj.weight")
            .column("*mlp.gate_proj.weight")
            .column("*mlp.up_proj.weight")
            .row("*mlp.down_proj.weight")
            .optional()
    }
}

impl CausalBody for Llama {
    const LANGUAGE_MODEL: &'static str = "LlamaForCausalLM";

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

    fn head_shape(&self) -> [i64; 2] {
        [self.options.vocab_size, self.options.hidden_size]
    }

    fn initializer_range(&self) -> f64 {
        self.options.initializer_range
    }

    fn tied_embedding(&self) -> Option<&Embedding> {
        self.options.tie_word_embeddings.then_some(&self.embed_tokens)
    }
}

/// Llama as a language model: from [`Tokens`] to logits `[batch, tokens, vocab_size]` of the next token.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `LlamaForCausalLM`.
///
/// ```
/// use brigade_models::{LlamaForCausalLm, LlamaOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = LlamaOptions {
///     vocab_size: 50, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
///     num_attention_heads: 4, num_key_value_heads: Some(2), ..Default::default()
/// };
/// let model = Model::new(|path| LlamaForCausalLm::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 8, 9]).view([1, 3]);
/// assert_eq!(model.forward(&ids)?.size(), [1, 3, 50]);
/// model.module().loss(&ids, &ids, 0.0)?.mean()?.backward();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub type LlamaForCausalLm = CausalLm<Llama>;

impl Transformer for Llama {
    type Options = LlamaOptions;

    const ARCHITECTURE: &'static str = "LlamaModel";
    const BODY: &'static str = "model";
    const EMBEDDING: &'static str = "embed_tokens.weight";

    fn build(path: &ParamPath<'_>, options: &LlamaOptions) -> Self {
        Self::new(path, options)
    }

    fn options(&self) -> &LlamaOptions {
        &self.options
    }
}
