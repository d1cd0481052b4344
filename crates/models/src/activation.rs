//! Activation functions of architectures.

use brigade_torch::Result;
use tch::Tensor;

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
    /// Applies the activation function to a tensor.
    ///
    /// # Errors
    /// Returns an error of libtorch, for example if memory runs out.
    pub fn apply(self, input: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Relu => input.f_relu(),
            Self::Mish => input.f_mish(),
            Self::Silu => input.f_silu(),
            Self::Gelu => input.f_gelu("none"),
            Self::GeluTanh => input.f_gelu("tanh"),
        }?)
    }
}

/// The activation between linear layers.
impl From<Activation> for brigade_torch::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Relu => Self::Relu,
            Activation::Mish => Self::Mish,
            Activation::Silu => Self::Silu,
            Activation::Gelu => Self::Gelu,
            Activation::GeluTanh => Self::GeluTanh,
        }
    }
}
