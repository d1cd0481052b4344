//! The affine map of GPT-2.

use std::borrow::Borrow;

use brigade_nn::{Error, Init, Module, ParamPath, Result};
use tch::Tensor;

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

impl Module<&Tensor> for Conv1D {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut size = input.size();
        let outputs = self.bias.size().first().copied().unwrap_or(0);
        let inputs = size.last_mut().map(|last| std::mem::replace(last, outputs)).unwrap_or(0);
        let rows = input.f_reshape([-1, inputs]);
        rows.and_then(|rows| self.bias.f_addmm(&rows, &self.weight)?.f_view(&size[..])).map_err(
            |error| {
                Error::custom(format!(
                    "{} cannot take an input of {:?}: {error}",
                    self.name,
                    input.size()
                ))
            },
        )
    }
}
