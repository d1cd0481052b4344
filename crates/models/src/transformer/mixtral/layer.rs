//! A layer of Mixtral.

use brigade_nn::{ExpertLoad, Experts, ExpertsOptions, Init, Module, ParamPath, RmsNorm};
use brigade_torch::Result;
use tch::Tensor;

use super::super::attention::Shared;
use super::super::blocks::Block;
use super::super::cache::LayerCache;
use super::super::rotated_attention::RotatedAttention;
use super::MixtralOptions;
use crate::init::{Redraw, redraw};

/// Attention and experts, each after a normalisation and beside its input.
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
            activation: options.hidden_act.function(),
            // No numbers are drawn for them before all layers are made, as in transformers.
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
        hidden: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Tensor> {
        Ok(self.forward_routed(hidden, shared, cache)?.0)
    }

    fn forward_routed(
        &self,
        hidden: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let input = self.input_layernorm.forward(hidden)?;
        let hidden = hidden.f_add(&self.attention.forward(&input, shared, cache)?)?;
        let input = self.post_attention_layernorm.forward(&hidden)?;
        let (output, routing) = self.experts.forward_routed(&input)?;
        Ok((hidden.f_add(&output)?, Some(routing.logits)))
    }
}
