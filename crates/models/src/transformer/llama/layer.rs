//! Layer of Llama.

use brigade_nn::{Branch, Linear, Module, ParamPath, RmsNorm, SwiGlu, SwiGluOptions};
use brigade_torch::{ResidualNorm, Result};

use super::super::attention::Shared;
use super::super::blocks::Block;
use super::super::cache::LayerCache;
use super::super::rotated_attention::RotatedAttention;
use super::LlamaOptions;
use crate::residual::Residual;

/// Attention and a gated feed-forward layer, each after a normalisation and with a residual connection.
#[derive(Debug)]
pub(super) struct LlamaLayer {
    attention: RotatedAttention,
    mlp: SwiGlu,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

impl LlamaLayer {
    pub(super) fn new(path: &ParamPath<'_>, options: &LlamaOptions) -> Self {
        let LlamaOptions { hidden_size: width, intermediate_size: inner, rms_norm_eps, .. } =
            *options;
        let attention = RotatedAttention::new(&(path / "self_attn"), &options.attention());
        let mlp = SwiGluOptions { bias: options.mlp_bias, activation: options.hidden_act };
        Self {
            attention,
            mlp: SwiGlu::with_options(path / "mlp", width, inner, mlp),
            input_layernorm: RmsNorm::new(path / "input_layernorm", width, rms_norm_eps),
            post_attention_layernorm: RmsNorm::new(
                path / "post_attention_layernorm",
                width,
                rms_norm_eps,
            ),
        }
    }

    /// Returns the linear layers, in the order in which their initial values are drawn.
    pub(super) fn linear(&self) -> impl Iterator<Item = &Linear> {
        self.attention.linear().into_iter().chain(self.mlp.linear())
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
        Ok(Residual::with_branch(stream, Branch::new(self.mlp.forward(&normed)?)))
    }
}
