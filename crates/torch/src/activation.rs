//! Activations of linear layers, and gated pairs of them.

use tch::Tensor;

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// Activation function, with PyTorch's formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// GELU: `x · Φ(x)`, with the exact distribution function (erf).
    Gelu,
    /// GELU of GPT-2: `x · Φ(x)`, with the distribution function approximated by tanh.
    GeluTanh,
    /// SiLU, also called Swish: `x / (1 + e⁻ˣ)`.
    Silu,
    /// Mish: `x · tanh(ln(1 + eˣ))`.
    Mish,
    /// ReLU: `max(x, 0)`.
    Relu,
    /// Squared ReLU: `max(x, 0)²`.
    ReluSquared,
}

impl Activation {
    /// Returns GELU with one of PyTorch's approximations, `none` or `tanh`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for any other approximation.
    ///
    /// ```
    /// use brigade_torch::Activation;
    /// assert_eq!(Activation::gelu("tanh")?, Activation::GeluTanh);
    /// assert!(Activation::gelu("sigmoid").is_err());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn gelu(approximate: &str) -> Result<Self, Error> {
        match approximate {
            "none" => Ok(Self::Gelu),
            "tanh" => Ok(Self::GeluTanh),
            other => Err(Error::invalid_argument(format!(
                "the approximation of GELU is {other}, expected none or tanh"
            ))),
        }
    }

    /// Applies the function by libtorch's operation, which keeps the layout of images. Behind a linear layer,
    /// [`activation()`] is faster on a GPU.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Tensor`] if memory runs out.
    ///
    /// ```
    /// use brigade_torch::Activation;
    /// use tch::Tensor;
    /// let output = Activation::ReluSquared.apply(&Tensor::from_slice(&[-2f32, 3.0]))?;
    /// assert_eq!(output, Tensor::from_slice(&[0f32, 9.0]));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn apply(self, input: &Tensor) -> Result<Tensor, Error> {
        Ok(match self {
            Self::Gelu => input.f_gelu("none"),
            Self::GeluTanh => input.f_gelu("tanh"),
            Self::Silu => input.f_silu(),
            Self::Mish => input.f_mish(),
            Self::Relu => input.f_relu(),
            Self::ReluSquared => input.f_relu()?.f_square(),
        }?)
    }

    /// Number in the kernels' text, kernels/activation.cu.
    pub(crate) fn number(self) -> i32 {
        match self {
            Self::Gelu => 0,
            Self::GeluTanh => 1,
            Self::Silu => 2,
            Self::Mish => 3,
            Self::Relu => 4,
            Self::ReluSquared => 5,
        }
    }
}

/// Output of a linear layer, and the bias that is still to be added to it.
#[derive(Debug, Clone, Copy)]
pub struct Biased<'a> {
    /// Values `[…, width]`.
    pub values: &'a Tensor,
    /// Bias `[width]`, in any floating-point type. `None` stands for 0.
    pub bias: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Biased<'a> {
    fn from(values: &'a Tensor) -> Self {
        Self { values, bias: None }
    }
}

/// Two outputs of linear layers, of which the activation of the first, the gate, multiplies the second.
#[derive(Debug, Clone, Copy)]
pub enum GatedPair<'a> {
    /// One tensor `[…, 2 · width]` with both: the gate first. Its bias has `2 · width` values.
    Packed(Biased<'a>),
    /// Two tensors of one shape.
    Two {
        /// Gate: what the activation is applied to.
        gate: Biased<'a>,
        /// Values that the gate multiplies.
        up: Biased<'a>,
    },
}

/// Arguments of the functions of C++.
struct Input<'a> {
    values: Biased<'a>,
    up: Option<Biased<'a>>,
    options: ffi::ActivationOptions,
}

impl<'a> Input<'a> {
    fn one(values: Biased<'a>, activation: Activation) -> Self {
        let options = ffi::ActivationOptions { activation: activation.number(), packed: false };
        Self { values, up: None, options }
    }

    fn pair(pair: GatedPair<'a>, activation: Activation) -> Self {
        let activation = activation.number();
        match pair {
            GatedPair::Packed(values) => {
                let options = ffi::ActivationOptions { activation, packed: true };
                Self { values, up: None, options }
            }
            GatedPair::Two { gate, up } => {
                let options = ffi::ActivationOptions { activation, packed: false };
                Self { values: gate, up: Some(up), options }
            }
        }
    }

    fn apply(&self) -> Result<Tensor, Error> {
        let Self { values, up, options } = self;
        ffi::activation(
            borrow(values.values),
            &borrow_optional(values.bias),
            &borrow_optional(up.map(|up| up.values)),
            &borrow_optional(up.and_then(|up| up.bias)),
            options,
        )
        .map(own)
        .map_err(|error| Error::libtorch("activation", &error))
    }

    fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, Error> {
        let Self { values, up, options } = self;
        ffi::activation_linear(
            borrow(values.values),
            &borrow_optional(values.bias),
            &borrow_optional(up.map(|up| up.values)),
            &borrow_optional(up.and_then(|up| up.bias)),
            borrow(weight),
            &borrow_optional(bias),
            options,
        )
        .map(own)
        .map_err(|error| Error::libtorch("activation_linear", &error))
    }
}

/// Computes `activation(values + bias)`.
///
/// On an NVIDIA GPU of compute capability 8.0 or newer it is one kernel for bfloat16, float16 and float32, which adds and
/// computes in float32. The backward is one kernel and, with a bias, a small one for its gradient, whose sums are the same
/// bits in each run. The backward keeps the values before the activation alone.
///
/// Otherwise, and for gradients of gradients, it is PyTorch's operations one after the other, in the type of the values.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for a bias that does not have one value for each of the last dimension.
///
/// ```
/// use brigade_torch::{Activation, Biased, activation};
/// use tch::Tensor;
///
/// let (values, bias) = (Tensor::from_slice2(&[[-2f32, 1.0]]), Tensor::from_slice(&[1f32, 2.0]));
/// let input = Biased { values: &values, bias: Some(&bias) };
/// assert_eq!(activation(input, Activation::ReluSquared)?, Tensor::from_slice2(&[[0f32, 9.0]]));
/// assert_eq!(activation(&values, Activation::Relu)?, Tensor::from_slice2(&[[0f32, 1.0]]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn activation<'a>(
    input: impl Into<Biased<'a>>,
    activation: Activation,
) -> Result<Tensor, Error> {
    Input::one(input.into(), activation).apply()
}

/// Computes `activation(gate) · up` of a pair with its biases: SwiGLU with [`Activation::Silu`], GEGLU with
/// [`Activation::Gelu`] ([Shazeer, 2020](https://arxiv.org/abs/2002.05202)).
///
/// On GPUs it is one kernel under the conditions of [`activation()`], and so are all gradients of the pair. On a CPU it is
/// one loop for bfloat16, float16 and float32 without biases, which computes in float32 and keeps the pair alone; results
/// are the same bits on any number of threads. Sigmoids and tails of the normal distribution below 1e-38 are 0.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for two tensors of different shapes, an odd last dimension of a packed pair, and a bias
/// that does not have one value for each of the last dimension.
///
/// ```
/// use brigade_torch::{Activation, GatedPair, gated_activation};
/// use tch::Tensor;
///
/// let packed = Tensor::from_slice2(&[[-1f32, 2.0, 5.0, 7.0]]);
/// let output = gated_activation(GatedPair::Packed((&packed).into()), Activation::Relu)?;
/// assert_eq!(output, Tensor::from_slice2(&[[0f32, 14.0]]));
/// let (gate, up) = (packed.narrow(1, 0, 2), packed.narrow(1, 2, 2));
/// let pair = GatedPair::Two { gate: (&gate).into(), up: (&up).into() };
/// assert_eq!(gated_activation(pair, Activation::Relu)?, output);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn gated_activation(pair: GatedPair<'_>, activation: Activation) -> Result<Tensor, Error> {
    Input::pair(pair, activation).apply()
}

/// Computes [`linear`](crate::linear) of [`activation()`], the second half of a feed-forward layer.
///
/// Where the activation is a kernel, and for GELU without a bias everywhere, only the values before the activation are
/// kept for the backward, which computes the activation again: half of the memory that two separate operations need.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] under the conditions of [`activation()`] and [`linear`](crate::linear).
///
/// ```
/// use brigade_torch::{Activation, activation, activation_linear, linear};
/// use tch::{Device, Kind, Tensor};
///
/// let options = (Kind::Float, Device::Cpu);
/// let (values, weight) = (Tensor::randn([2, 8], options), Tensor::ones([3, 8], options));
/// let output = activation_linear(&values, Activation::Silu, &weight, None)?;
/// let expected = linear(&activation(&values, Activation::Silu)?, &weight, None)?;
/// assert!(output.allclose(&expected, 1e-5, 1e-6, false));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn activation_linear<'a>(
    input: impl Into<Biased<'a>>,
    activation: Activation,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor, Error> {
    Input::one(input.into(), activation).linear(weight, bias)
}

/// Computes [`linear`](crate::linear) of [`gated_activation`], the second half of a gated feed-forward layer.
///
/// Where the activation is a kernel or a loop, only the pair is kept for the backward, which computes the activation again.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] under the conditions of [`gated_activation`] and [`linear`](crate::linear).
///
/// ```
/// use brigade_torch::{Activation, GatedPair, gated_activation, gated_linear, linear};
/// use tch::{Device, Kind, Tensor};
///
/// let options = (Kind::Float, Device::Cpu);
/// let (packed, weight) = (Tensor::randn([2, 16], options), Tensor::ones([3, 8], options));
/// let pair = GatedPair::Packed((&packed).into());
/// let output = gated_linear(pair, Activation::Silu, &weight, None)?;
/// let expected = linear(&gated_activation(pair, Activation::Silu)?, &weight, None)?;
/// assert!(output.allclose(&expected, 1e-5, 1e-6, false));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn gated_linear(
    pair: GatedPair<'_>,
    activation: Activation,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor, Error> {
    Input::pair(pair, activation).linear(weight, bias)
}

/// Returns `true` if the device of a linear layer's input has kernels that add the layer's bias in the pass of the
/// activation behind it, for the type of the layer's output. Its gradient then needs no pass over the output's gradient.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if CUDA fails.
///
/// ```
/// use brigade_torch::activation_adds_bias;
/// use tch::{Device, Kind, Tensor};
/// assert!(!activation_adds_bias(&Tensor::ones([2, 8], (Kind::Float, Device::Cpu)))?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn activation_adds_bias(input: &Tensor) -> Result<bool, Error> {
    ffi::activation_adds_bias(borrow(input))
        .map_err(|error| Error::libtorch("activation_adds_bias", &error))
}
