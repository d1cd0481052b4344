//! Layer of Llama.

use brigade_nn::{Linear, LinearOptions, Module, ParamPath, RmsNorm};
use brigade_torch::Result;
use tch::Tensor;

use super::super::attention::Shared;
use super::super::blocks::Block;
use super::super::cache::LayerCache;
use super::super::rotated_attention::RotatedAttention;
use super::LlamaOptions;
use crate::Activation;

/// Attention and a gated feed-forward layer, each after a normalisation and with a residual connection.
#[derive(Debug)]
pub(super) struct LlamaLayer {
    attention: RotatedAttention,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    activation: Activation,
}

impl LlamaLayer {
    pub(super) fn new(path: &ParamPath<'_>, options: &LlamaOptions) -> Self {
        let LlamaOptions { hidden_size: width, intermediate_size: inner, rms_norm_eps, .. } =
            *options;
        let attention = RotatedAttention::new(&(path / "self_attn"), &options.attention());
        let mlp = path / "mlp";
        let linear = |name: &str, inputs, outputs| {
            let bias = options.mlp_bias;
            Linear::with_options(&mlp / name, inputs, outputs, LinearOptions { bias })
        };
        Self {
            attention,
            gate_proj: linear("gate_proj", width, inner),
            up_proj: linear("up_proj", width, inner),
            down_proj: linear("down_proj", inner, width),
            input_layernorm: RmsNorm::new(path / "input_layernorm", width, rms_norm_eps),
            post_attention_layernorm: RmsNorm::new(
                path / "post_attention_layernorm",
                width,
                rms_norm_eps,
            ),
            activation: options.hidden_act,
        }
    }

    /// Returns the linear layers, in the order in which their initial values are drawn.
    pub(super) fn linear(&self) -> impl Iterator<Item = &Linear> {
        let Self { attention, gate_proj, up_proj, down_proj, .. } = self;
        attention.linear().into_iter().chain([gate_proj, up_proj, down_proj])
    }
}

impl Block for LlamaLayer {
    fn forward(
        &self,
        hidden: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Tensor> {
        let input = self.input_layernorm.forward(hidden)?;
        let attended = self.attention.forward(&input, shared, cache)?;
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
