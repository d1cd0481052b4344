//! RMS normalisation.

use std::borrow::Borrow;

use brigade_torch::Result;
use tch::Tensor;

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
