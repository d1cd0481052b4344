//! What a layer or a model does with its input.

use brigade_torch::Result;
use tch::Tensor;

/// A function of tensors with parameters.
///
/// Implement it for the input that your forward takes; one type may take several.
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
    /// A layer's name, the shape of its input and libtorch's reason, where the two do not fit. What a module
    /// refuses for a reason of its own is [`brigade_torch::Error::custom`]; `?` takes what tch's operators `f_…`
    /// return. Operators without `f_` panic, and [`crate::Model::forward`] gives that as an error.
    fn forward(&self, input: Input) -> Result<Self::Output>;
}

/// A module from tensor to tensor that a [`crate::Sequential`] can hold.
pub trait Layer: for<'a> Module<&'a Tensor, Output = Tensor> + Send {}

impl<M> Layer for M where M: for<'a> Module<&'a Tensor, Output = Tensor> + Send {}
