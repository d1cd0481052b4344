//! Activations as layers, for [`Sequential`](crate::Sequential).

use brigade_torch::Result;
use tch::Tensor;

use crate::Module;
use crate::error::ModelError;

/// Rectified linear unit: `max(x, 0)`, for any shape.
///
/// ```
/// use brigade_nn::{Module, Relu};
/// use tch::Tensor;
/// assert_eq!(Relu.forward(&Tensor::from_slice(&[-1f32, 2.0]))?, Tensor::from_slice(&[0f32, 2.0]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Relu;

impl Module<&Tensor> for Relu {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_relu().map_err(|source| ModelError::layer("Relu", input, source))?)
    }
}
