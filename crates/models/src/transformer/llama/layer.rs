//! Layer of Llama.

use brigade_nn::{Branch, Linear, LinearOptions, Module, ParamPath, RmsNorm};
use brigade_torch::{ResidualNorm, Result};

use super::super::attention::Shared;
use super::super::blocks::Block;
use super::super::cache::LayerCache;
use super::super::rotated_attention::RotatedAttention;
use super::LlamaOptions;
use crate::Activation;
use crate::residual::Residual;

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
        hidden: &Residual,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Residual> {
        let ResidualNorm { stream, normed } = hidden.rms_norm(&self.input_layernorm)?;
        let attended = Branch::new(self.attention.forward(&normed, shared, cache)?);
        let ResidualNorm { stream, normed } =
            self.post_attention_layernorm.forward_residual(&stream, Some(&attended))?;
        let input = match self.gate_proj.divided() {
            Some(divided) => divided.region.enter(&normed)?,
            None => normed,
        };
        let gate = self.activation.apply(&self.gate_proj.forward_entered(&input)?)?;
        let inner = gate.f_mul(&self.up_proj.forward_entered(&input)?)?;
        Ok(Residual::with_branch(stream, Branch::new(self.down_proj.forward(&inner)?)))
    }
}
