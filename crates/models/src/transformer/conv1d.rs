//! The affine map of GPT-2.

use std::borrow::Borrow;

use brigade_nn::{Init, ModelError, Module, ParamPath};
use brigade_torch::{Result, gelu_linear, linear};
use tch::Tensor;

use crate::Activation;

/// `y = x W + b` with `weight` `[in, out]`: transformers' `Conv1D`, a linear layer whose weight is the other way
/// round.
#[derive(Debug)]
pub(super) struct Conv1D {
    name: String,
    weight: Tensor,
    bias: Tensor,
}

impl Conv1D {
    pub(super) fn new<'a>(path: impl Borrow<ParamPath<'a>>, inputs: i64, outputs: i64) -> Self {
        let path = path.borrow();
        Self {
            name: path.name().to_owned(),
            weight: path.parameter(
                "weight",
                &[inputs, outputs],
                Init::Normal { mean: 0.0, std: 0.02 },
            ),
            bias: path.parameter("bias", &[outputs], Init::Zeros),
        }
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Conv1D {
    /// The output for the activation of the input. GELU is computed again in the backward, which keeps half of
    /// what it would otherwise.
    pub(super) fn forward_activated(
        &self,
        input: &Tensor,
        activation: Activation,
    ) -> Result<Tensor> {
        let Some(approximate) = activation.gelu_approximation() else {
            return self.forward(&activation.apply(input)?);
        };
        let output =
            gelu_linear(input, approximate, &self.weight.f_transpose(0, 1)?, Some(&self.bias));
        self.finish(output, input)
    }

    fn finish(&self, output: Result<Tensor>, input: &Tensor) -> Result<Tensor> {
        Ok(output.map_err(|error| ModelError::Layer {
            layer: self.name.clone(),
            input: input.size(),
            reason: error.to_string(),
        })?)
    }
}

impl Module<&Tensor> for Conv1D {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.finish(linear(input, &self.weight.f_transpose(0, 1)?, Some(&self.bias)), input)
    }
}
