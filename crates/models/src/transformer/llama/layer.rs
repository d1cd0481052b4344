//! A layer of Llama.

use brigade_nn::{Linear, LinearOptions, Module, ParamPath, RmsNorm, Training};
use brigade_torch::Result;
use tch::Tensor;

use super::super::attention::{OwnHeads, attend, check_heads, split_heads};
use super::super::blocks::{Block, Shared};
use super::super::cache::LayerCache;
use super::LlamaOptions;
use crate::Activation;

/// Attention and a gated perceptron, each after a normalisation and beside its input.
#[derive(Debug)]
pub(super) struct LlamaLayer {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    activation: Activation,
    training: Training,
    dropout: f64,
    heads: OwnHeads,
    /// All of them where the projections are not divided.
    key_heads: i64,
    /// Where every rank projects to all keys: the one head that this rank's queries share.
    shared_key_head: Option<i64>,
}

impl LlamaLayer {
    pub(super) fn new(path: &ParamPath<'_>, options: &LlamaOptions) -> Self {
        let LlamaOptions { hidden_size: width, intermediate_size: inner, rms_norm_eps, .. } =
            *options;
        let (heads, key_heads) = (options.num_attention_heads, options.key_heads());
        let (own, keys) = (heads * options.head_width(), key_heads * options.head_width());
        let (attention, mlp) = (path / "self_attn", path / "mlp");
        let linear = |path: &ParamPath<'_>, name: &str, inputs, outputs, bias| {
            Linear::with_options(path / name, inputs, outputs, LinearOptions { bias })
        };
        let (bias, mlp_bias) = (options.attention_bias, options.mlp_bias);
        let q_proj = linear(&attention, "q_proj", width, own, bias);
        let ranks = q_proj.divided().map_or(1, |divided| divided.part.ranks() as i64);
        // With fewer heads of keys than ranks, several ranks share one: each projects to all of them.
        let is_shared = key_heads % ranks != 0 && key_heads > 0 && ranks % key_heads == 0;
        let path_of_keys = if is_shared { attention.replicated() } else { attention.clone() };
        let k_proj = linear(&path_of_keys, "k_proj", width, keys, bias);
        let v_proj = linear(&path_of_keys, "v_proj", width, keys, bias);
        let others = if is_shared { vec![] } else { vec![k_proj.divided(), v_proj.divided()] };
        let heads = OwnHeads::new(&attention, heads, q_proj.divided(), &others);
        if !is_shared {
            check_heads(&attention, key_heads, "heads of keys and values", ranks);
        }
        let rank = heads.region.group().map_or(0, |group| group.rank() as i64);
        let shared_key_head = is_shared.then(|| rank * key_heads / ranks);
        Self {
            q_proj,
            k_proj,
            v_proj,
            o_proj: linear(&attention, "o_proj", own, width, bias),
            gate_proj: linear(&mlp, "gate_proj", width, inner, mlp_bias),
            up_proj: linear(&mlp, "up_proj", width, inner, mlp_bias),
            down_proj: linear(&mlp, "down_proj", inner, width, mlp_bias),
            input_layernorm: RmsNorm::new(path / "input_layernorm", width, rms_norm_eps),
            post_attention_layernorm: RmsNorm::new(
                path / "post_attention_layernorm",
                width,
                rms_norm_eps,
            ),
            activation: options.hidden_act,
            training: attention.training(),
            dropout: options.attention_dropout,
            heads,
            key_heads: if is_shared { key_heads } else { key_heads / ranks },
            shared_key_head,
        }
    }

    /// In the order in which they are drawn.
    pub(super) fn linear(&self) -> [&Linear; 7] {
        let Self { q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, .. } = self;
        [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
    }

    fn attend(
        &self,
        input: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Tensor> {
        let OwnHeads { count, region } = &self.heads;
        let entered = region.enter(input)?;
        let mut queries = split_heads(&self.q_proj.forward_entered(&entered)?, *count)?;
        let of_keys = |layer: &Linear| match self.shared_key_head {
            None => split_heads(&layer.forward_entered(&entered)?, self.key_heads),
            // Its weight is whole on every rank, and so is its gradient, which is summed behind the projection.
            Some(head) => {
                let all = region.enter(&layer.forward(input)?)?;
                Ok(split_heads(&all, self.key_heads)?.f_narrow(1, head, 1)?)
            }
        };
        let (mut keys, values) = (of_keys(&self.k_proj)?, of_keys(&self.v_proj)?);
        if let Some(rotation) = &shared.rotation {
            (queries, keys) = (rotation.apply(&queries)?, rotation.apply(&keys)?);
        }
        let (keys, values) = match cache {
            Some(cache) => cache.extend(&keys, &values)?,
            None => (keys, values),
        };
        let dropout = if self.training.is_on() { self.dropout } else { 0.0 };
        let attended = attend([&queries, &keys, &values], &shared.mask, dropout, None, region)?;
        self.o_proj.forward(&attended)
    }
}

impl Block for LlamaLayer {
    fn forward(
        &self,
        hidden: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Tensor> {
        let attended = self.attend(&self.input_layernorm.forward(hidden)?, shared, cache)?;
        let hidden = hidden.f_add(&attended)?;
        let input = self.post_attention_layernorm.forward(&hidden)?;
        let input = match self.gate_proj.divided() {
            Some(divided) => divided.region.enter(&input)?,
            None => input,
        };
        let gate = self.activation.apply(&self.gate_proj.forward_entered(&input)?)?;
        let inner = gate.f_mul(&self.up_proj.forward_entered(&input)?)?;
        Ok(hidden.f_add(&self.down_proj.forward(&inner)?)?)
    }
}
