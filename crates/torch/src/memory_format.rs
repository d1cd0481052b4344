//! The channels-last memory format, which tch does not support.

use tch::Tensor;

use crate::bridge::{borrow, ffi, own};
use crate::error::Error;

/// Returns a tensor `[n, c, h, w]` with its channels last in memory (`torch.channels_last`), differentiable. A tensor
/// that has this format already is returned without a copy.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] if the tensor does not have four dimensions; [`crate::TorchError::Libtorch`]
/// if memory runs out.
///
/// ```
/// use brigade_torch::{channels_last, is_channels_last};
/// use tch::{Device, Kind, Tensor};
/// let images = Tensor::zeros([8, 3, 32, 32], (Kind::Float, Device::Cpu));
/// let images = channels_last(&images)?;
/// assert!(is_channels_last(&images)?);
/// assert_eq!(images.size(), [8, 3, 32, 32]);
/// assert_eq!(images.stride(), [3072, 1, 96, 3]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn channels_last(tensor: &Tensor) -> Result<Tensor, Error> {
    if tensor.dim() != 4 {
        return Err(Error::invalid_argument(format!(
            "channels_last: expected [n, c, h, w], found {:?}",
            tensor.size()
        )));
    }
    let made = ffi::channels_last(borrow(tensor))
        .map_err(|error| Error::libtorch("channels_last", &error))?;
    Ok(own(made))
}

/// Returns `true` if the strides are those of [`channels_last`]. If both formats have the same order in memory, as with
/// one channel, they are distinguished by the strides.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for a tensor without strides.
pub fn is_channels_last(tensor: &Tensor) -> Result<bool, Error> {
    ffi::is_channels_last(borrow(tensor))
        .map_err(|error| Error::libtorch("is_channels_last", &error))
}

/// Returns `true` if convolutions on the CPU use oneDNN's kernels, which are faster with channels last.
#[must_use]
pub fn has_onednn() -> bool {
    ffi::has_onednn()
}
