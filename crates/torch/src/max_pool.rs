//! Max pooling.

use tch::Tensor;

use crate::bridge::{borrow, ffi, own};
use crate::error::Error;

/// Computes the maximum of each window, as
/// [torch.nn.functional.max_pool2d](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.max_pool2d.html)
/// without dilation: from `[n, c, h, w]` to `[n, c, h', w']` with `h' = ⌊(h + 2·padding − kernel) / stride⌋ + 1`.
///
/// On the CPU, float32 and bfloat16 in channels_last with 16 channels or more run through loops of this crate: they
/// store the position of the largest value in one byte where libtorch uses eight, and write each value of the gradient
/// once. Results and gradients are those of libtorch, bit for bit, except that a sum of several gradients in bfloat16
/// is rounded once. All other cases call libtorch.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for a window that does not fit the image, and a padding of more than half of it.
///
/// ```
/// use brigade_torch::{channels_last, max_pool2d};
/// use tch::{Device, Kind, Tensor};
/// let images = channels_last(&Tensor::rand([8, 64, 28, 28], (Kind::Float, Device::Cpu)))?;
/// let halved = max_pool2d(&images, [2, 2], [2, 2], [0, 0])?;
/// assert_eq!(halved.size(), [8, 64, 14, 14]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn max_pool2d(
    input: &Tensor,
    kernel: [i64; 2],
    stride: [i64; 2],
    padding: [i64; 2],
) -> Result<Tensor, Error> {
    ffi::max_pool2d(borrow(input), &kernel, &stride, &padding)
        .map(own)
        .map_err(|error| Error::libtorch("max_pool2d", &error))
}
