//! The linear layer of GPT-2, whose weight is transposed.

use std::borrow::Borrow;

use brigade_nn::{
    Branch, Divided, Dropout, Init, ModelError, Module, ParamPath, PreActivation, QuantizedSlot,
    TensorRegion,
};
use brigade_sharding::TensorStyle;
use brigade_torch::{
    Activation, Biased, LinearParameters, Result, activation_adds_bias, activation_linear,
    feed_forward, linear, norm_residual_adds_bias,
};
use tch::Tensor;

/// Affine map `y = x W + b` with `weight` `[in, out]`: transformers' `Conv1D`, a linear layer with a transposed weight.
#[derive(Debug)]
pub(super) struct Conv1D {
    name: String,
    weight: Tensor,
    bias: Tensor,
    divided: Option<Divided>,
    region: TensorRegion,
    quantized: QuantizedSlot,
}

impl Conv1D {
    pub(super) fn new<'a>(path: impl Borrow<ParamPath<'a>>, inputs: i64, outputs: i64) -> Self {
        let path = path.borrow();
        let shape = [inputs, outputs];
        let init = Init::Normal { mean: 0.0, std: 0.02 };
        let (weight, divided) = path.divided_parameter("weight", &shape, [1, 0], init);
        let bias = path.divided_bias("bias", outputs, divided.as_ref(), Init::Zeros);
        let quantized = path.quantizable("weight", true);
        let region = path.tensor_region();
        Self { name: path.name().to_owned(), weight, bias, divided, region, quantized }
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Division of the weight over the ranks of a tensor group.
    pub(super) fn divided(&self) -> Option<&Divided> {
        self.divided.as_ref()
    }

    /// Returns the number of outputs that this rank of a tensor group computes.
    pub(super) fn outputs(&self) -> i64 {
        self.weight.size().last().copied().unwrap_or_default()
    }

    /// Computes the output for the activation of the input, as [`brigade_nn::Linear::forward_activated`].
    pub(super) fn forward_activated(
        &self,
        input: &PreActivation,
        activation: Activation,
    ) -> Result<Tensor> {
        if self.quantized.is_set() {
            return self.forward(&input.activate(activation)?);
        }
        self.compute(&input.values, |values, weight, bias| {
            let input = Biased { values, bias: input.bias.as_ref() };
            activation_linear(input, activation, weight, bias)
        })
    }

    /// Computes the output, without the bias where the activation behind the layer adds it, as
    /// [`brigade_nn::Linear::forward_pre_activation`].
    pub(super) fn forward_pre_activation(&self, input: &Tensor) -> Result<PreActivation> {
        let is_row = matches!(&self.divided, Some(Divided { style: TensorStyle::Row, .. }));
        if is_row || self.quantized.is_set() || !activation_adds_bias(input)? {
            return Ok(PreActivation::new(self.forward(input)?));
        }
        let values = self.compute(input, |input, weight, _| linear(input, weight, None))?;
        let bias = match self.divided {
            Some(_) => self.bias.shallow_clone(),
            None => self.region.enter_parameter(&self.bias)?,
        };
        Ok(PreActivation { values, bias: Some(bias) })
    }

    /// Computes the output as a residual branch, as [`brigade_nn::Linear::forward_branch`].
    pub(super) fn forward_branch(&self, input: &Tensor, dropout: &Dropout) -> Result<Branch> {
        let Some(bias) = self.bias_of_branch(input)? else {
            return dropout.branch(self.forward(input)?);
        };
        let values = self.compute(input, |input, weight, _| linear(input, weight, None))?;
        dropout.biased_branch(values, Some(bias))
    }

    /// Computes the output for the activation of the input as a residual branch, as
    /// [`brigade_nn::Linear::forward_activated_branch`].
    pub(super) fn forward_activated_branch(
        &self,
        input: &PreActivation,
        activation: Activation,
        dropout: &Dropout,
    ) -> Result<Branch> {
        let Some(own_bias) = self.bias_of_branch(&input.values)? else {
            return dropout.branch(self.forward_activated(input, activation)?);
        };
        let values = self.compute(&input.values, |values, weight, _| {
            let input = Biased { values, bias: input.bias.as_ref() };
            activation_linear(input, activation, weight, None)
        })?;
        dropout.biased_branch(values, Some(own_bias))
    }

    /// Computes a feed-forward layer of which this is the first layer, as [`brigade_nn::Linear::forward_feed_forward`].
    pub(super) fn forward_feed_forward(
        &self,
        input: &Tensor,
        activation: Activation,
        second: &Self,
    ) -> Result<Tensor> {
        match self.both(input, activation, second, Some(&second.bias))? {
            Some(output) => Ok(output),
            None => second.forward_activated(&self.forward_pre_activation(input)?, activation),
        }
    }

    /// Computes the same as a residual branch, as [`brigade_nn::Linear::forward_feed_forward_branch`].
    pub(super) fn forward_feed_forward_branch(
        &self,
        input: &Tensor,
        activation: Activation,
        second: &Self,
        dropout: &Dropout,
    ) -> Result<Branch> {
        let Some(own_bias) = second.bias_of_branch(input)? else {
            return dropout.branch(self.forward_feed_forward(input, activation, second)?);
        };
        match self.both(input, activation, second, None)? {
            Some(output) => dropout.biased_branch(output, Some(own_bias)),
            None => {
                let hidden = self.forward_pre_activation(input)?;
                second.forward_activated_branch(&hidden, activation, dropout)
            }
        }
    }

    /// Computes both layers as one operation, if it can compute them.
    fn both(
        &self,
        input: &Tensor,
        activation: Activation,
        second: &Self,
        second_bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let is_plain = |layer: &Self| layer.divided.is_none() && !layer.quantized.is_set();
        if !is_plain(self) || !is_plain(second) {
            return Ok(None);
        }
        let weight = |layer: &Self| layer.region.enter_parameter(&layer.weight.f_transpose(0, 1)?);
        let (own, last) = (weight(self)?, weight(second)?);
        let bias = self.region.enter_parameter(&self.bias)?;
        let second_bias =
            second_bias.map(|bias| second.region.enter_parameter(bias)).transpose()?;
        let first = LinearParameters { weight: &own, bias: Some(&bias) };
        let last = LinearParameters { weight: &last, bias: second_bias.as_ref() };
        self.finish(feed_forward(input, first, activation, last), input).map(Some)
    }

    /// Returns the bias if the normalisation behind the layer is to add it.
    fn bias_of_branch(&self, input: &Tensor) -> Result<Option<Tensor>> {
        let leaves = self.divided.is_none()
            && !self.quantized.is_set()
            && norm_residual_adds_bias(input, &self.bias)?;
        leaves.then(|| self.region.enter_parameter(&self.bias)).transpose()
    }

    fn compute(
        &self,
        input: &Tensor,
        product: impl FnOnce(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if let Some(quantized) = self.quantized.get() {
            return self.finish(quantized.linear(input, Some(&self.bias)), input);
        }
        let weight = self.weight.f_transpose(0, 1)?;
        match &self.divided {
            Some(Divided { style: TensorStyle::Row, region, .. }) => {
                let summand = self.finish(product(input, &weight, None), input)?;
                Ok(region.leave(&summand)?.f_add(&region.enter_parameter(&self.bias)?)?)
            }
            Some(divided) => {
                let entered = divided.region.enter(input)?;
                self.finish(product(&entered, &weight, Some(&self.bias)), input)
            }
            None => {
                let weight = self.region.enter_parameter(&weight)?;
                let bias = self.region.enter_parameter(&self.bias)?;
                self.finish(product(input, &weight, Some(&bias)), input)
            }
        }
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
        self.compute(input, linear)
    }
}
