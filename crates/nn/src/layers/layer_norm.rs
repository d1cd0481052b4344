//! Layer normalisation.

use std::borrow::Borrow;

use brigade_torch::Result;
use tch::Tensor;

use crate::layer_context::LayerContext;
use crate::{Init, Module, ParamPath, TensorRegion};

/// Layer normalisation: `y = (x − mean) / √(var + eps) · weight + bias`, with the mean and the biased variance over the
/// last dimensions `shape` of `[…, shape]`, for each position separately.
///
/// Parameters: `weight` (initially 1) and `bias` (initially 0), both of that shape
/// ([torch.nn.LayerNorm](https://docs.pytorch.org/docs/stable/generated/torch.nn.LayerNorm.html)).
///
/// ```
/// use brigade_nn::{LayerNorm, Model};
/// use tch::Tensor;
///
/// let model = Model::new(|p| LayerNorm::new(p, &[2]))?;
/// // mean 2, variance 1
/// let output = model.forward(&Tensor::from_slice(&[1f32, 3.0]))?;
/// assert!((output.double_value(&[1]) - 0.999995).abs() < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerNorm {
    shape: Vec<i64>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    eps: f64,
    region: TensorRegion,
    context: LayerContext,
}

/// Options of [`LayerNorm`].
#[derive(Debug, Clone, Copy)]
pub struct LayerNormOptions {
    /// Value added to the variance, for numerical stability. Defaults to 1e-5.
    pub eps: f64,
    /// `true` if the layer has a `weight`, and a `bias` unless `bias` is `false`. Defaults to `true`.
    pub affine: bool,
    /// `true` if the layer has a `bias`. Defaults to `true`.
    pub bias: bool,
}

impl Default for LayerNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, affine: true, bias: true }
    }
}

impl LayerNorm {
    /// Registers `weight` and `bias` at the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, shape: &[i64]) -> Self {
        Self::with_options(path, shape, LayerNormOptions::default())
    }

    /// Registers the parameters at the path, by the options.
    pub fn with_options<'a>(
        path: impl Borrow<ParamPath<'a>>,
        shape: &[i64],
        options: LayerNormOptions,
    ) -> Self {
        let path = path.borrow();
        let LayerNormOptions { eps, affine, bias } = options;
        Self {
            shape: shape.to_vec(),
            weight: affine.then(|| path.parameter("weight", shape, Init::Ones)),
            bias: (affine && bias).then(|| path.parameter("bias", shape, Init::Zeros)),
            eps,
            region: path.tensor_region(),
            context: path.norm_layer(),
        }
    }
}

impl Module<&Tensor> for LayerNorm {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.context.weights.run(input, |input| {
            let entered = |parameter: &Option<Tensor>| {
                parameter.as_ref().map(|it| self.region.enter_parameter(it)).transpose()
            };
            let (weight, bias) = (entered(&self.weight)?, entered(&self.bias)?);
            let output =
                input.f_layer_norm(&self.shape, weight.as_ref(), bias.as_ref(), self.eps, true);
            self.context.finish(output, input)
        })
    }
}
