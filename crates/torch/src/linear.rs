//! Linear layers.

use tch::Tensor;

use crate::activation::{Activation, activation_linear};
use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// Computes `input · weightᵀ + bias`, as
/// [torch.nn.functional.linear](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear.html):
/// `input` `[…, in]`, `weight` `[out, in]`, `bias` `[out]`.
///
/// On a CPU without instructions for 16-bit products, where libtorch emulates them, a product in bfloat16 or float16
/// (by its operands or by autocast) is computed in float32, several times faster and more exactly. The weight is not
/// rounded to 16 bits. Input, output and their gradients keep their 16 bits; the gradient of a float32 weight is not
/// rounded to them.
///
/// Under autocast with its cache, a product in 16 bits takes a copy of a float32 weight in its type. The copy is kept
/// with the weight, and used by all products, until anything writes to the weight; steps of [`crate::fused`] write it as
/// well. It takes 2 bytes for each element. A recorded graph reads and writes the copies at their addresses; what the
/// host has written since is cast before a replay.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices do not match.
///
/// ```
/// use brigade_torch::{Autocast, linear};
/// use tch::{Device, Kind, Tensor};
/// let options = (Kind::Float, Device::Cpu);
/// let (input, weight) = (Tensor::ones([2, 8], options), Tensor::ones([3, 8], options));
/// let _scope = Autocast::enter(Device::Cpu, Kind::BFloat16, true)?;
/// let output = linear(&input, &weight, None)?;
/// assert_eq!((output.kind(), output.double_value(&[0, 0])), (Kind::BFloat16, 8.0));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, Error> {
    ffi::linear(borrow(input), borrow(weight), &borrow_optional(bias))
        .map(own)
        .map_err(|error| Error::libtorch("linear", &error))
}

/// Computes [`linear`] of `gelu(input)`, as [`activation_linear`] does, and saves only the input for the backward, which
/// computes the activation again: half of the memory that two separate operations need. `approximate` is `none` or
/// `tanh`, as in [torch.nn.functional.gelu](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.gelu.html).
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for any other value of `approximate`; [`crate::TorchError::Libtorch`] if shapes,
/// kinds or devices do not match.
///
/// ```
/// use brigade_torch::gelu_linear;
/// use tch::{Device, Kind, Tensor};
/// let options = (Kind::Float, Device::Cpu);
/// let (input, weight) = (Tensor::randn([2, 8], options), Tensor::ones([3, 8], options));
/// let output = gelu_linear(&input, "tanh", &weight, None)?;
/// assert!(output.allclose(&input.gelu("tanh").linear::<Tensor>(&weight, None), 1e-5, 1e-6, false));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn gelu_linear(
    input: &Tensor,
    approximate: &str,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor, Error> {
    activation_linear(input, Activation::gelu(approximate)?, weight, bias)
}

/// Weight `[out, in]` and bias `[out]` of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct LinearParameters<'a> {
    /// Weight `[out, in]`.
    pub weight: &'a Tensor,
    /// Bias `[out]`. `None` stands for 0.
    pub bias: Option<&'a Tensor>,
}

/// Computes a feed-forward layer: [`activation_linear`](crate::activation_linear) of [`linear`].
///
/// On NVIDIA GPUs of compute capability 8.0 or newer, with products in bfloat16 or float16, [`Activation::GeluTanh`] and
/// a first bias, the activation and its gradient are computed in the products' epilogues (cuBLASLt), which also give the
/// gradients of biases. The first calls for each shape measure algorithms of the library and the operations one after
/// the other; the fastest is used from then on. Only the values before the activation are kept for the backward, which
/// computes the activation again. Sizes that are not multiples of 8, other activations and types, and calls without
/// gradients are the two operations.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] under the conditions of [`linear`].
///
/// ```
/// use brigade_torch::{Activation, LinearParameters, feed_forward};
/// use tch::{Device, Kind, Tensor};
/// let options = (Kind::Float, Device::Cpu);
/// let (input, bias) = (Tensor::randn([2, 8], options), Tensor::ones([16], options));
/// let [first, second] = [[16, 8], [8, 16]].map(|size| Tensor::randn(size, options));
/// let output = feed_forward(
///     &input,
///     LinearParameters { weight: &first, bias: Some(&bias) },
///     Activation::GeluTanh,
///     LinearParameters { weight: &second, bias: None },
/// )?;
/// let hidden = input.linear(&first, Some(&bias)).gelu("tanh");
/// assert!(output.allclose(&hidden.linear::<Tensor>(&second, None), 1e-5, 1e-5, false));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn feed_forward(
    input: &Tensor,
    first: LinearParameters<'_>,
    activation: Activation,
    second: LinearParameters<'_>,
) -> Result<Tensor, Error> {
    ffi::feed_forward(
        borrow(input),
        borrow(first.weight),
        &borrow_optional(first.bias),
        borrow(second.weight),
        &borrow_optional(second.bias),
        &ffi::ActivationOptions { activation: activation.number(), packed: false },
    )
    .map(own)
    .map_err(|error| Error::libtorch("feed_forward", &error))
}
