//! Dropout.

use tch::Tensor;

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// Sets each value to 0 with a probability, divides the others by one minus that probability, and adds a residual of
/// the same shape: [dropout in
/// training](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.dropout.html), for any shape.
///
/// On the CPU no mask is stored: each call draws one number from libtorch's generator, and a counter-based generator
/// (Philox4x32-7) computes from it and a value's position whether the value is dropped, again in the backward. So the
/// same state of the generator gives the same bits, with any number of threads, but not those of libtorch's dropout.
/// The probability is rounded to a multiple of 1/65536, and values are divided by one minus the rounded one, which
/// keeps their mean. On other devices it calls libtorch's.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for a probability that is not in `[0, 1]`, and if the shape of the residual differs.
///
/// ```
/// use brigade_torch::dropout;
/// use tch::{Device, Kind, Tensor};
/// let ones = Tensor::ones([1000], (Kind::Float, Device::Cpu));
/// let output = dropout(&ones, 0.5, Some(&ones))?;
/// // Dropped, or twice as large; and the residual.
/// assert!(output.eq(1.0).logical_or(&output.eq(3.0)).all().int64_value(&[]) == 1);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn dropout(
    input: &Tensor,
    probability: f64,
    residual: Option<&Tensor>,
) -> Result<Tensor, Error> {
    ffi::dropout(borrow(input), &borrow_optional(residual), probability)
        .map(own)
        .map_err(|error| Error::libtorch("dropout", &error))
}
