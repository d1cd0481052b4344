//! The affine map.

use std::borrow::Borrow;

use brigade_torch::{Result, gelu_linear, linear};
use tch::Tensor;

use crate::layer_context::LayerContext;
use crate::{Init, Module, ParamPath};

/// `y = x Wᵀ + b`, from `[…, in]` to `[…, out]`.
///
/// Parameters: `weight` `[out, in]` and `bias` `[out]`, both uniform in `±1/√in`
/// ([torch.nn.Linear](https://docs.pytorch.org/docs/stable/generated/torch.nn.Linear.html)).
///
/// ```
/// use brigade_nn::{Kind, Linear, Model, Tensor};
///
/// let model = Model::new(|p| Linear::new(p, 3, 2))?;
/// let input = Tensor::ones([5, 3], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&input)?.size(), [5, 2]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    context: LayerContext,
}

/// Options of [`Linear`].
#[derive(Debug, Clone, Copy)]
pub struct LinearOptions {
    /// Adds `b`; on by default.
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

    /// Registers `weight` and, if asked for, `bias` at the path.
    pub fn with_options<'a>(
        path: impl Borrow<ParamPath<'a>>,
        inputs: i64,
        outputs: i64,
        options: LinearOptions,
    ) -> Self {
        let path = path.borrow();
        Self {
            weight: path.parameter("weight", &[outputs, inputs], Init::KaimingUniform),
            bias: options
                .bias
                .then(|| path.parameter("bias", &[outputs], Init::fan_in_bias(inputs))),
            context: path.layer(),
        }
    }

    /// `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Computes the layer of `gelu(input)` and keeps the input alone for the backward, which computes the activation
    /// again: half of what the two operations keep. `approximate` is `none` or `tanh`.
    ///
    /// # Errors
    /// For another approximation, and as the forward for an input of another shape.
    ///
    /// ```
    /// use brigade_nn::{Kind, Linear, Model, Module, Tensor};
    ///
    /// let model = Model::new(|p| Linear::new(p, 3, 2))?;
    /// let input = Tensor::randn([5, 3], (Kind::Float, model.device()));
    /// let fused = model.module().forward_gelu(&input, "none")?;
    /// assert!(fused.allclose(&model.forward(&input.gelu("none"))?, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_gelu(&self, input: &Tensor, approximate: &str) -> Result<Tensor> {
        let output = gelu_linear(input, approximate, &self.weight, self.bias.as_ref());
        self.context.finish_border(output, input)
    }

    /// `[out]`.
    #[must_use]
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module<&Tensor> for Linear {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let output = linear(input, &self.weight, self.bias.as_ref());
        self.context.finish_border(output, input)
    }
}
