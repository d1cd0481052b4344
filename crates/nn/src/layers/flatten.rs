//! Flattening.

use brigade_torch::Result;
use tch::Tensor;

use crate::Module;
use crate::error::ModelError;

/// Flattens all dimensions but the first: `[n, a, b, …]` becomes `[n, a·b·…]`.
///
/// ```
/// use brigade_nn::{Flatten, Module};
/// use tch::{Kind, Tensor};
/// let maps = Tensor::zeros([8, 64, 7, 7], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(Flatten.forward(&maps)?.size(), [8, 3136]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Flatten;

impl Module<&Tensor> for Flatten {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_flatten(1, -1).map_err(|source| ModelError::layer("Flatten", input, source))?)
    }
}
