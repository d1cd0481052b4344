//! RMS normalisation.

use std::borrow::Borrow;

use brigade_torch::{NormResidualOptions, ResidualNorm, Result, norm_residual};
use tch::Tensor;

use super::branch::{Branch, add_and_normalize};
use crate::layer_context::LayerContext;
use crate::{Init, Module, ParamPath, TensorRegion};

/// RMS normalisation: `y = x / √(mean(x²) + eps) · weight`, with the mean over the last dimension of `[…, width]`, for
/// each position separately.
///
/// Parameter: `weight` `[width]` (initially 1)
/// ([torch.nn.RMSNorm](https://docs.pytorch.org/docs/stable/generated/torch.nn.RMSNorm.html)). Inputs of 16 bits are
/// normalised in 32 bits.
///
/// ```
/// use brigade_nn::{Model, RmsNorm};
/// use tch::Tensor;
///
/// let model = Model::new(|p| RmsNorm::new(p, 2, 0.0))?;
/// // mean square 25
/// let output = model.forward(&Tensor::from_slice(&[1f32, 7.0]))?;
/// assert!((output.double_value(&[1]) - 1.4).abs() < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct RmsNorm {
    weight: Tensor,
    width: i64,
    eps: f64,
    region: TensorRegion,
    context: LayerContext,
}

impl RmsNorm {
    /// Registers `weight` at the path. `eps` is added to the mean square.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, width: i64, eps: f64) -> Self {
        let path = path.borrow();
        let weight = path.parameter("weight", &[width], Init::Ones);
        Self { weight, width, eps, region: path.tensor_region(), context: path.norm_layer() }
    }
}

impl RmsNorm {
    /// Adds a branch to a residual stream, with the branch's dropout, and normalises the sum: `stream + branch`, and
    /// `forward` of it. Without a branch only normalises.
    ///
    /// On a GPU under autocast it is one kernel, whose `normed` has autocast's type
    /// ([`brigade_torch::norm_residual`]).
    ///
    /// ```
    /// use brigade_nn::{Branch, Model, Module, RmsNorm};
    /// use brigade_torch::Result;
    /// use tch::{Kind, Tensor};
    ///
    /// struct Block(RmsNorm);
    /// impl Module<&Tensor> for Block {
    ///     type Output = Tensor;
    ///     fn forward(&self, stream: &Tensor) -> Result<Tensor> {
    ///         let branch = Branch::new(stream.f_silu()?);
    ///         Ok(self.0.forward_residual(stream, Some(&branch))?.normed)
    ///     }
    /// }
    /// let model = Model::new(|path| Block(RmsNorm::new(path, 8, 1e-6)))?;
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
        add_and_normalize(&self.context, self, stream, branch, false, |stream, branch| {
            let weight = self.region.enter_parameter(&self.weight)?;
            let shape = [self.width];
            let options = NormResidualOptions {
                weight: Some(&weight),
                eps: self.eps,
                rms: true,
                ..NormResidualOptions::new(&shape)
            };
            norm_residual(stream, branch, &options)
        })
    }
}

impl Module<&Tensor> for RmsNorm {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.context.weights.run(input, |input| {
            let weight = self.region.enter_parameter(&self.weight)?;
            let output = input.f_rms_norm([self.width], Some(&weight), self.eps);
            self.context.finish(output, input)
        })
    }
}
