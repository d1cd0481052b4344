//! What a layer or a model does with its input.

use tch::Tensor;

/// A function of tensors with parameters.
///
/// Implement it for the input that your forward takes; one type may take several.
///
/// ```
/// use brigade_nn::{Linear, Module, ParamPath, Tensor};
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
///     fn forward(&self, (left, right): (&Tensor, &Tensor)) -> Tensor {
///         (self.tower.forward(left) - self.tower.forward(right)).abs()
///     }
/// }
/// ```
///
/// A forward returns no `Result`: operators would not read as formulas. What fails in it ends it, as
/// tch's operators do, and [`crate::Model::try_forward`] (and with it the `forward` of a prepared model)
/// gives that as an error, with the layer's name; a direct call panics with the same text. A model that
/// wants to answer with an error of its own can say so in `Output`.
pub trait Module<Input> {
    /// What comes out: mostly a tensor.
    type Output;

    /// Computes the output.
    fn forward(&self, input: Input) -> Self::Output;
}

/// A module from tensor to tensor that a [`crate::Sequential`] can hold.
pub trait Layer: for<'a> Module<&'a Tensor, Output = Tensor> + Send {}

impl<M> Layer for M where M: for<'a> Module<&'a Tensor, Output = Tensor> + Send {}
