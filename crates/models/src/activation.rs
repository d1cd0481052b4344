//! Activation functions of architectures.

use brigade_torch::Result;
use tch::{TchError, Tensor};

/// Activation function after a normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Activation {
    /// ReLU: `max(x, 0)`, computed together with the normalisation before it.
    #[default]
    Relu,
    /// Mish: `x · tanh(ln(1 + eˣ))` (Misra, 2019).
    Mish,
    /// SiLU, also called Swish: `x / (1 + e⁻ˣ)`.
    Silu,
    /// GELU: `x · Φ(x)`, with the exact distribution function.
    Gelu,
    /// GELU of GPT-2: `x · Φ(x)`, with the distribution function approximated by tanh.
    GeluTanh,
}

impl Activation {
    /// Returns how GELU is approximated, in PyTorch's words; `None` for another activation.
    pub(crate) fn gelu_approximation(self) -> Option<&'static str> {
        match self {
            Self::Gelu => Some("none"),
            Self::GeluTanh => Some("tanh"),
            _ => None,
        }
    }

    /// Applies the activation function to a tensor.
    ///
    /// # Errors
    /// Returns an error of libtorch, for example if memory runs out.
    pub fn apply(self, input: &Tensor) -> Result<Tensor> {
        Ok(self.function()(input)?)
    }

    /// Returns the function by itself, for a layer that is given one.
    pub(crate) fn function(self) -> fn(&Tensor) -> std::result::Result<Tensor, TchError> {
        match self {
            Self::Relu => Tensor::f_relu,
            Self::Mish => Tensor::f_mish,
            Self::Silu => Tensor::f_silu,
            Self::Gelu => |input| input.f_gelu("none"),
            Self::GeluTanh => |input| input.f_gelu("tanh"),
        }
    }
}
