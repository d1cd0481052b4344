//! Mixtral, after Hugging Face's transformers.

mod files;
mod layer;
mod options;

use std::borrow::Borrow;

use brigade_checkpoint::WeightsReader;
use brigade_nn::{
    ContextPart, Embedding, EmbeddingOptions, ExpertLoad, LayerGroups, Module, ParamPath, RmsNorm,
    TensorParallelPlan, load_balancing_loss_of, load_balancing_sums,
};
use brigade_sharding::TensorPlan;
use brigade_torch::{Error, Result};
use tch::{Kind, Tensor};

use self::layer::MixtralLayer;
pub use self::options::MixtralOptions;
use super::attention::Shared;
use super::blocks::Blocks;
use super::causal_lm::{CausalBody, CausalLm, HeadInput};
use super::context::Context;
use super::rotary::Rotary;
use super::{KeyValueCache, Tokens, Transformer};

/// Mixtral without a head (Jiang et al., 2024): from [`Tokens`] to hidden states `[batch, tokens, hidden_size]`. It is
/// a [`Llama`](crate::Llama) whose feed-forward layers are mixtures of [`Experts`](brigade_nn::Experts).
///
/// Names, initial values (for a seed) and outputs are those of transformers' `MixtralModel`, version 5, in which the
/// experts of a layer are two tensors. Files are written with the names of the published files, with three tensors for
/// each expert; files with the names of version 5 can be read, too.
#[derive(Debug)]
pub struct Mixtral {
    embed_tokens: Embedding,
    layers: Blocks<MixtralLayer>,
    norm: RmsNorm,
    rotary: Rotary,
    context: Context,
    name: String,
    options: MixtralOptions,
}

/// Results of a forward for this rank's tokens.
struct OwnStates {
    hidden: Tensor,
    /// Logits of each layer's router, or `sums` of them.
    routers: Vec<Tensor>,
    sums: Option<Tensor>,
    part: ContextPart,
    tied_weight: Option<Tensor>,
}

impl Mixtral {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &MixtralOptions) -> Self {
        let path = path.borrow();
        options.check(path);
        let width = options.hidden_size;
        let padding = options.pad_token_id;
        let embed_tokens = Embedding::with_options(
            path / "embed_tokens",
            options.vocab_size,
            width,
            EmbeddingOptions { padding },
        );
        let layers = path / "layers";
        let layers: Vec<_> = (0..options.num_hidden_layers)
            .map(|index| MixtralLayer::new(&(&layers / index), options))
            .collect();
        let norm = RmsNorm::new(path / "norm", width, options.rms_norm_eps);
        // The layers have been initialised by their defaults before.
        super::init::draw_table(path, &embed_tokens, options.initializer_range, padding);
        for layer in &layers {
            layer.draw(path, options.initializer_range);
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
            context: Context::new(path, &[options.attention_dropout, options.router_jitter_noise]),
            name: path.name().to_owned(),
            options: options.clone(),
        }
    }

    /// Returns the output, and the logits `[tokens, num_local_experts]` of each layer's router, for
    /// [`load_balancing_loss`](brigade_nn::load_balancing_loss) and [`router_z_loss`](brigade_nn::router_z_loss) with
    /// other coefficients than the config's.
    ///
    /// # Errors
    /// Returns the errors of the forward; [`brigade_torch::ErrorKind::InvalidArgument`] for a model in the stages of a
    /// pipeline, and with context parallelism.
    pub fn forward_routed<'t>(
        &self,
        tokens: impl Into<Tokens<'t>>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let refused = |found: &str| {
            Err(Error::invalid_argument(format!(
                "forward_routed returns the logits of all routers for all tokens, and each rank {found}: take the \
                 language model's loss with output_router_logits instead"
            )))
        };
        if self.layers.is_cut() {
            return refused("of the pipeline has some layers");
        }
        let own = self.own_states(tokens.into(), None, None, false)?;
        if own.part.is_divided() {
            return refused("of the context group has a part of the tokens");
        }
        Ok((own.hidden, own.routers))
    }

    /// Returns the input of each layer and the normalised output of the last one: transformers' `output_hidden_states`.
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

    /// Returns the load of the experts of each layer in the last forward, for this rank's tokens. Empty before the
    /// first forward.
    #[must_use]
    pub fn expert_loads(&self) -> Vec<ExpertLoad> {
        self.layers.map(MixtralLayer::load).into_iter().flatten().collect()
    }

    /// Computes the hidden states, and the sums of [`load_balancing_sums`] over the layers for this rank's tokens if
    /// `balanced`, else the logits of the routers.
    fn own_states(
        &self,
        tokens: Tokens<'_>,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
        balanced: bool,
    ) -> Result<OwnStates> {
        let past = cache.as_deref().map_or(0, KeyValueCache::past);
        // Rotary embeddings have no maximum position, but quality drops beyond the sequence length of the training.
        let (_, length) = tokens.checked_size(past, i64::MAX)?;
        if tokens.token_type_ids.is_some() {
            return Err(Error::invalid_argument("Mixtral has no token types: give ids and a mask"));
        }
        let own = self.context.causal(&tokens, past, cache.as_deref())?;
        let part = own.part;
        let mask = match self.options.sliding_window {
            Some(window) if part.is_divided() && length > window => {
                return Err(Error::invalid_argument(format!(
                    "a sliding window of {window} tokens is not computed for {length} tokens of which each rank of the \
                     context group has a part: take shorter sequences, or no context axis"
                )));
            }
            Some(window) => {
                let step = cache.as_deref().and_then(KeyValueCache::step);
                own.mask.within_window(window, past, &tokens, step)?
            }
            None => own.mask,
        };
        let counted = if balanced { Some(self.counted(&tokens, &part)?) } else { None };
        let mut tied_weight = None;
        let (hidden, routers, sums) = self.context.run(&part, &own.ids, || {
            let embedded = || {
                let (words, weight) = self.embed_tokens.forward_tied(&own.ids)?;
                tied_weight = self.options.tie_word_embeddings.then_some(weight);
                Ok(words)
            };
            let kind = self.embed_tokens.weight().kind();
            let rotation = Some(self.rotary.at(&own.positions, kind)?);
            let shared = Shared::new(mask, rotation, part.clone());
            let Some(counted) = &counted else {
                let (hidden, routers) =
                    self.layers.forward_routed(embedded, &shared, cache, seen)?;
                return Ok((hidden.rms_norm(&self.norm)?.normed, routers, None));
            };
            let sums_of = |logits: &Tensor| {
                load_balancing_sums(&[logits], self.options.num_experts_per_tok, counted.as_ref())
            };
            let sums = if kind == Kind::Double { Kind::Double } else { Kind::Float };
            let none = [2 * self.options.num_local_experts + 1];
            let none = Tensor::f_zeros(none, (sums, own.ids.device()))?;
            let (hidden, sums) = self.layers.forward_summed(embedded, &shared, &none, sums_of)?;
            Ok((hidden.rms_norm(&self.norm)?.normed, Vec::new(), Some(sums)))
        })?;
        Ok(OwnStates { hidden, routers, sums, part, tied_weight })
    }

    /// Returns the mask of this rank's tokens that count in the loss of routers, `[batch, own tokens]`; `None` if all
    /// count.
    fn counted(&self, tokens: &Tokens<'_>, part: &ContextPart) -> Result<Option<Tensor>> {
        // A mask of pairs does not show which tokens are padding.
        let mask = tokens.attention_mask.filter(|mask| mask.dim() == 2);
        Ok(match mask {
            Some(mask) => Some(part.take(mask, 1)?),
            None if part.is_divided() => Some(part.take(&tokens.ids.f_ones_like()?, 1)?),
            None => None,
        })
    }
}

impl<'t, I: Into<Tokens<'t>>> Module<I> for Mixtral {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        self.run(tokens.into(), None, None)
    }
}

impl LayerGroups for Mixtral {
    /// Groups the parameters: the embedding, each layer, and the last normalisation.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let full = |name: &str| super::full_name(&self.name, name);
        let layers =
            (0..self.options.num_hidden_layers).map(|index| vec![full(&format!("layers.{index}"))]);
        let embedding = vec![full("embed_tokens")];
        [embedding].into_iter().chain(layers).chain([vec![full("norm")]]).collect()
    }
}

impl TensorParallelPlan for Mixtral {
    /// Divides attention by heads, and the embedding by the vocabulary. Every rank of the tensor group has all experts, or
    /// some of them with expert parallelism.
    fn tensor_plan() -> TensorPlan {
        TensorPlan::new()
            .vocabulary("*embed_tokens.weight")
            .column("*self_attn.q_proj.weight")
            .column("*self_attn.k_proj.weight")
            .column("*self_attn.v_proj.weight")
            .row("*self_attn.o_proj.weight")
            .optional()
    }
}

impl CausalBody for Mixtral {
    const LANGUAGE_MODEL: &'static str = "MixtralForCausalLM";

    fn run(
        &self,
        tokens: Tokens<'_>,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor> {
        let own = self.own_states(tokens, cache, seen, false)?;
        own.part.gather(&own.hidden, 1)
    }

    fn run_part(&self, tokens: Tokens<'_>) -> Result<(Tensor, ContextPart)> {
        let own = self.own_states(tokens, None, None, false)?;
        Ok((own.hidden, own.part))
    }

    /// Runs this rank's part. With [`MixtralOptions::output_router_logits`] it also returns the load-balancing loss of
    /// all layers' routers, times its coefficient.
    fn run_for_head(&self, tokens: Tokens<'_>) -> Result<HeadInput> {
        let balanced = self.options.output_router_logits;
        let OwnStates { hidden, sums, part, tied_weight, .. } =
            self.own_states(tokens, None, None, balanced)?;
        let loss = |sums: &Tensor| {
            let loss = load_balancing_loss_of(&part.sum(sums)?)?;
            Ok::<_, Error>(loss.f_mul_scalar(self.options.router_aux_loss_coef)?)
        };
        let loss = sums.as_ref().map(loss).transpose()?;
        Ok(HeadInput { hidden, part, loss, tied_weight })
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

/// Mixtral as a language model: from [`Tokens`] to logits `[batch, tokens, vocab_size]` of the next token.
///
/// Names, initial values (for a seed) and outputs are those of transformers' `MixtralForCausalLM`; with
/// [`MixtralOptions::output_router_logits`] the loss includes that of the routers.
///
/// ```
/// use brigade_models::{MixtralForCausalLm, MixtralOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = MixtralOptions {
///     vocab_size: 50, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
///     num_attention_heads: 4, num_key_value_heads: Some(2), num_local_experts: 4,
///     output_router_logits: true, ..Default::default()
/// };
/// let model = Model::new(|path| MixtralForCausalLm::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 8, 9]).view([1, 3]);
/// assert_eq!(model.forward(&ids)?.size(), [1, 3, 50]);
/// model.module().loss(&ids, &ids, 0.0)?.mean()?.backward();
/// let loads = model.module().body().expert_loads();
/// assert_eq!(loads[0].tokens.iter().sum::<i64>(), 3 * 2);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub type MixtralForCausalLm = CausalLm<Mixtral>;

impl Transformer for Mixtral {
    type Options = MixtralOptions;

    const ARCHITECTURE: &'static str = "MixtralModel";
    const BODY: &'static str = "model";
    const EMBEDDING: &'static str = "embed_tokens.weight";

    fn build(path: &ParamPath<'_>, options: &MixtralOptions) -> Self {
        Self::new(path, options)
    }

    fn options(&self) -> &MixtralOptions {
        &self.options
    }

    fn adapt_weights(weights: &mut WeightsReader) -> Result<()> {
        files::adapt(weights)
    }

    fn saved_tensors(name: &str, tensor: &Tensor) -> Result<Vec<(String, Tensor)>> {
        files::saved(name, tensor)
    }
}
