//! Layer of Mixtral.

use brigade_nn::{Branch, ExpertLoad, Experts, ExpertsOptions, Init, ParamPath, RmsNorm};
use brigade_torch::{ResidualNorm, Result};
use tch::Tensor;

use super::super::attention::Shared;
use super::super::blocks::Block;
use super::super::cache::LayerCache;
use super::super::rotated_attention::RotatedAttention;
use super::MixtralOptions;
use crate::init::{Redraw, redraw};
use crate::residual::Residual;

/// Attention and experts, each after a normalisation and with a residual connection.
#[derive(Debug)]
pub(super) struct MixtralLayer {
    attention: RotatedAttention,
    experts: Experts,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

impl MixtralLayer {
    pub(super) fn new(path: &ParamPath<'_>, options: &MixtralOptions) -> Self {
        let (width, eps) = (options.hidden_size, options.rms_norm_eps);
        let experts = ExpertsOptions {
            experts: options.num_local_experts,
            experts_per_token: options.num_experts_per_tok,
            jitter: options.router_jitter_noise,
            activation: options.hidden_act,
            // They are initialised once all layers are built, as in transformers.
            first_values: Some(Init::Zeros),
            ..ExpertsOptions::default()
        };
        Self {
            attention: RotatedAttention::new(&(path / "self_attn"), &options.attention()),
            experts: Experts::new(path / "mlp", width, options.intermediate_size, experts),
            input_layernorm: RmsNorm::new(path / "input_layernorm", width, eps),
            post_attention_layernorm: RmsNorm::new(path / "post_attention_layernorm", width, eps),
        }
    }

    /// Draws the initial values of the weights.
    pub(super) fn draw(&self, path: &ParamPath<'_>, deviation: f64) {
        for layer in self.attention.linear() {
            super::super::init::draw(path, layer, deviation);
        }
        for weight in [self.experts.router_weight(), self.experts.gate_up(), self.experts.down()] {
            redraw(path, weight, Redraw::Normal(deviation));
        }
    }

    pub(super) fn load(&self) -> Option<ExpertLoad> {
        self.experts.load()
    }
}

impl Block for MixtralLayer {
    fn forward(
        &self,
        hidden: &Residual,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Residual> {
        Ok(self.forward_routed(hidden, shared, cache)?.0)
    }

    fn forward_routed(
        &self,
        hidden: &Residual,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<(Residual, Option<Tensor>)> {
        let ResidualNorm { stream, normed } = hidden.rms_norm(&self.input_layernorm)?;
        let attended = Branch::new(self.attention.forward(&normed, shared, cache)?);
        let ResidualNorm { stream, normed } =
            self.post_attention_layernorm.forward_residual(&stream, Some(&attended))?;
        let (output, routing) = self.experts.forward_routed(&normed)?;
        Ok((Residual::with_branch(stream, Branch::new(output)), Some(routing.logits)))
    }
}
