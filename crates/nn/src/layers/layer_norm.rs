//! Layer normalisation.

use std::borrow::Borrow;

use brigade_torch::{NormResidualOptions, ResidualNorm, Result, norm_residual};
use tch::Tensor;

use super::branch::{Branch, add_and_normalize};
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

impl LayerNorm {
    /// Adds a branch to a residual stream, with the branch's dropout, and normalises the sum: `stream + branch`, and
    /// `forward` of it, for a block that normalises in front of its layers (pre-norm). Without a branch only normalises.
    ///
    /// On a GPU under autocast it is one kernel, whose `normed` has autocast's type
    /// ([`brigade_torch::norm_residual`]).
    ///
    /// ```
    /// use brigade_nn::{Branch, LayerNorm, Model, Module, ParamPath};
    /// use brigade_torch::Result;
    /// use tch::{Kind, Tensor};
    ///
    /// struct Block(LayerNorm);
    /// impl Module<&Tensor> for Block {
    ///     type Output = Tensor;
    ///     fn forward(&self, stream: &Tensor) -> Result<Tensor> {
    ///         let branch = Branch::new(stream.f_gelu("none")?);
    ///         let output = self.0.forward_residual(stream, Some(&branch))?;
    ///         // The input of the next layer is `output.normed`.
    ///         Ok(output.stream + output.normed)
    ///     }
    /// }
    /// let model = Model::new(|path| Block(LayerNorm::new(path, &[8])))?;
    /// let stream = Tensor::randn([2, 8], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&stream)?.size(), [2, 8]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error with the layer's name if shapes do not match.
    pub fn forward_residual(
        &self,
        stream: &Tensor,
        branch: Option<&Branch>,
    ) -> Result<ResidualNorm> {
        self.add_and_normalize(stream, branch, false)
    }

    /// Does the same as [`LayerNorm::forward_residual`] for a block that normalises behind its layers (post-norm): the
    /// next stream is the normalised sum, in the type of the sum.
    ///
    /// # Errors
    /// Returns the same errors.
    pub fn forward_post_residual(
        &self,
        stream: &Tensor,
        branch: Option<&Branch>,
    ) -> Result<ResidualNorm> {
        self.add_and_normalize(stream, branch, true)
    }

    fn add_and_normalize(
        &self,
        stream: &Tensor,
        branch: Option<&Branch>,
        post: bool,
    ) -> Result<ResidualNorm> {
        add_and_normalize(&self.context, self, stream, branch, post, |stream, branch| {
            let (weight, bias) = self.parameters()?;
            let options = NormResidualOptions {
                weight: weight.as_ref(),
                bias: bias.as_ref(),
                eps: self.eps,
                post,
                ..NormResidualOptions::new(&self.shape)
            };
            norm_residual(stream, branch, &options)
        })
    }

    /// Returns weight and bias as a region of a tensor group takes them.
    fn parameters(&self) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let entered = |parameter: &Option<Tensor>| {
            parameter.as_ref().map(|it| self.region.enter_parameter(it)).transpose()
        };
        Ok((entered(&self.weight)?, entered(&self.bias)?))
    }
}

impl Module<&Tensor> for LayerNorm {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.context.weights.run(input, |input| {
            let (weight, bias) = self.parameters()?;
            let output =
                input.f_layer_norm(&self.shape, weight.as_ref(), bias.as_ref(), self.eps, true);
            self.context.finish(output, input)
        })
    }
}
