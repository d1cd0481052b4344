//! Linear layer.

use std::borrow::Borrow;

use brigade_sharding::TensorStyle;
use brigade_torch::{Result, gelu_linear, linear};
use tch::Tensor;

use crate::layer_context::LayerContext;
use crate::{Divided, Init, Module, ParamPath, QuantizedSlot, TensorRegion};

/// Linear layer: `y = x Wᵀ + b`, from `[…, in]` to `[…, out]`.
///
/// Parameters: `weight` `[out, in]` and `bias` `[out]`, both uniform in `±1/√in`
/// ([torch.nn.Linear](https://docs.pytorch.org/docs/stable/generated/torch.nn.Linear.html)).
///
/// ```
/// use brigade_nn::{Linear, Model};
/// use tch::{Kind, Tensor};
///
/// let model = Model::new(|p| Linear::new(p, 3, 2))?;
/// let input = Tensor::ones([5, 3], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&input)?.size(), [5, 2]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// With tensor parallelism ([`crate::ModelBuilder::tensor_parallel`]) the weight may be divided: by output features
/// (column, heads, vocabulary), where a rank has `[part of out, in]` and computes its part of the outputs; or by input
/// features (row), where a rank has `[out, part of in]`, gets its part of the input, and the outputs of all ranks are
/// summed. The bias is added once.
#[derive(Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    context: LayerContext,
    divided: Option<Divided>,
    region: TensorRegion,
    quantized: QuantizedSlot,
}

/// Options of [`Linear`].
#[derive(Debug, Clone, Copy)]
pub struct LinearOptions {
    /// Adds the bias `b`. Defaults to `true`.
    pub bias: bool,
}

impl Default for LinearOptions {
    fn default() -> Self {
        Self { bias: true }
    }
}

impl Linear {
    /// Registers `weight` and `bias` at the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, inputs: i64, outputs: i64) -> Self {
        Self::with_options(path, inputs, outputs, LinearOptions::default())
    }

    /// Registers the parameters at the path: `weight` `[outputs, inputs]` and, if the options enable it, `bias`
    /// `[outputs]`.
    pub fn with_options<'a>(
        path: impl Borrow<ParamPath<'a>>,
        inputs: i64,
        outputs: i64,
        options: LinearOptions,
    ) -> Self {
        let path = path.borrow();
        let shape = [outputs, inputs];
        let (weight, divided) =
            path.divided_parameter("weight", &shape, [0, 1], Init::KaimingUniform);
        let bias = options.bias.then(|| {
            path.divided_bias("bias", outputs, divided.as_ref(), Init::fan_in_bias(inputs))
        });
        Self {
            weight,
            bias,
            context: path.layer(),
            divided,
            region: path.tensor_region(),
            quantized: path.quantizable("weight", false),
        }
    }

    /// Returns the weight `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Applies the layer to `gelu(input)`, and saves only the input for the backward, which computes the activation
    /// again: half of the memory that two separate operations need. `approximate` is `none` or `tanh`.
    ///
    /// # Errors
    /// Returns the same errors as the forward, and fails for any other value of `approximate`.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Module};
    /// use tch::{Kind, Tensor};
    ///
    /// let model = Model::new(|p| Linear::new(p, 3, 2))?;
    /// let input = Tensor::randn([5, 3], (Kind::Float, model.device()));
    /// let fused = model.module().forward_gelu(&input, "none")?;
    /// assert!(fused.allclose(&model.forward(&input.gelu("none"))?, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_gelu(&self, input: &Tensor, approximate: &str) -> Result<Tensor> {
        if self.quantized.is_set() {
            return self.forward(&input.f_gelu(approximate)?);
        }
        self.compute(input, true, |input, weight, bias| {
            gelu_linear(input, approximate, weight, bias)
        })
    }

    /// Computes the layer for an input that was passed through [`crate::TensorRegion::enter`], so that layers with the
    /// same input, such as the projections of attention, send only one message for its gradient. Equals the forward if
    /// the weight is not divided by output features.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    pub fn forward_entered(&self, input: &Tensor) -> Result<Tensor> {
        self.compute(input, false, linear)
    }

    /// Returns the bias `[out]`, if the layer has one.
    #[must_use]
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the division of the weight over the ranks of a tensor group. `None` if every rank has the whole weight.
    #[must_use]
    pub fn divided(&self) -> Option<&Divided> {
        self.divided.as_ref()
    }

    fn compute(
        &self,
        input: &Tensor,
        enters: bool,
        product: impl FnOnce(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.context.weights.run(input, |input| self.compute_here(input, enters, product))
    }

    fn compute_here(
        &self,
        input: &Tensor,
        enters: bool,
        product: impl FnOnce(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        if let Some(quantized) = self.quantized.get() {
            return self.context.finish_border(quantized.linear(input, bias), input);
        }
        match &self.divided {
            Some(Divided { style: TensorStyle::Row, region, .. }) => {
                let summand = self.context.check_border(product(input, weight, None), input)?;
                let mut output = region.leave(&summand)?;
                if let Some(bias) = bias {
                    let bias = region.enter_parameter(bias)?;
                    output = self.context.check(output.f_add(&bias), input)?;
                }
                Ok(self.context.output(output))
            }
            Some(divided) => {
                let entered =
                    if enters { divided.region.enter(input)? } else { input.shallow_clone() };
                self.context.finish_border(product(&entered, weight, bias), input)
            }
            None => {
                let weight = self.region.enter_parameter(weight)?;
                let bias = bias.map(|bias| self.region.enter_parameter(bias)).transpose()?;
                self.context.finish_border(product(input, &weight, bias.as_ref()), input)
            }
        }
    }
}

impl Module<&Tensor> for Linear {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.compute(input, true, linear)
    }
}
