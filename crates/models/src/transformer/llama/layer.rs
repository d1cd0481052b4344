//! A layer of Llama.

use brigade_nn::{Linear, LinearOptions, Module, ParamPath, RmsNorm, Training};
use brigade_torch::Result;
use tch::Tensor;

use super::super::attention::{attend, split_heads};
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
    heads: i64,
    key_heads: i64,
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
        Self {
            q_proj: linear(&attention, "q_proj", width, own, bias),
            k_proj: linear(&attention, "k_proj", width, keys, bias),
            v_proj: linear(&attention, "v_proj", width, keys, bias),
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
            key_heads,
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
        let heads = |layer: &Linear, heads| split_heads(&layer.forward(input)?, heads);
        let (mut queries, mut keys) =
            (heads(&self.q_proj, self.heads)?, heads(&self.k_proj, self.key_heads)?);
        let values = heads(&self.v_proj, self.key_heads)?;
        if let Some(rotation) = &shared.rotation {
            (queries, keys) = (rotation.apply(&queries)?, rotation.apply(&keys)?);
        }
        let (keys, values) = match cache {
            Some(cache) => cache.extend(&keys, &values)?,
            None => (keys, values),
        };
        let dropout = if self.training.is_on() { self.dropout } else { 0.0 };
        self.o_proj.forward(&attend([&queries, &keys, &values], &shared.mask, dropout, None)?)
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
        let gate = self.activation.apply(&self.gate_proj.forward(&input)?)?;
        let inner = gate.f_mul(&self.up_proj.forward(&input)?)?;
        Ok(hidden.f_add(&self.down_proj.forward(&inner)?)?)
    }
}
