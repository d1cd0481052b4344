//! The trait of modules: layers and models.

use brigade_torch::Result;
use tch::Tensor;

/// A function of tensors with parameters.
///
/// Implement it for the type of input of your forward. A type may implement it for several types of input.
///
/// ```
/// use brigade_nn::{Linear, Module, ParamPath};
/// use tch::Tensor;
/// use brigade_torch::Result;
///
/// struct Siamese {
///     tower: Linear,
/// }
///
/// impl Siamese {
///     fn new(path: &ParamPath) -> Self {
///         Self { tower: Linear::new(path / "tower", 784, 16) }
///     }
/// }
///
/// impl Module<(&Tensor, &Tensor)> for Siamese {
///     type Output = Tensor;
///
///     fn forward(&self, (left, right): (&Tensor, &Tensor)) -> Result<Tensor> {
///         Ok((self.tower.forward(left)? - self.tower.forward(right)?).abs())
///     }
/// }
/// ```
pub trait Module<Input> {
    /// Type of the output, usually a tensor.
    type Output;

    /// Computes the output for an input.
    ///
    /// # Errors
    /// For an invalid input, the error contains the layer's name, the shape of its input and libtorch's message. Return
    /// errors of your own as [`brigade_torch::Error::custom`]; `?` converts the errors of tch's operators `f_…`.
    /// Operators without `f_` panic, which [`crate::Model::forward`] returns as an error.
    fn forward(&self, input: Input) -> Result<Self::Output>;
}

/// A module from tensor to tensor that can be an element of a [`crate::Sequential`].
pub trait Layer: for<'a> Module<&'a Tensor, Output = Tensor> + Send {}

impl<M> Layer for M where M: for<'a> Module<&'a Tensor, Output = Tensor> + Send {}
