//! Images of bytes as normalised values.

use tch::{Kind, Tensor};

use crate::bridge::{borrow, ffi, own};
use crate::error::Error;

/// Computes `(images / 255 − mean) / std` of images of bytes, `[n, c, h, w]` in any memory format: images of a
/// floating-point kind in channels-last memory format, as 16-bit convolutions take them. `mean` and `std` have a value
/// for each channel.
///
/// On an NVIDIA GPU of compute capability 8.0 or newer, images with up to four channels are converted to bfloat16,
/// float16 or float32 by one kernel, which reads each byte once and writes each value once. All other cases call
/// libtorch's operations, in float32.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] with [`crate::Fault::Invalid`] for images that are not bytes `[n, c, h, w]`, another
/// number of means or standard deviations than channels, and a kind that is not a floating-point one.
///
/// ```
/// use brigade_torch::{is_channels_last, normalized_images};
/// use tch::{Device, Kind, Tensor};
/// let images = Tensor::full([2, 3, 8, 8], 255, (Kind::Uint8, Device::Cpu));
/// let values = normalized_images(&images, &[0.5; 3], &[0.25; 3], Kind::BFloat16)?;
/// assert_eq!((values.kind(), values.double_value(&[0, 0, 0, 0])), (Kind::BFloat16, 2.0));
/// assert!(is_channels_last(&values)?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn normalized_images(
    images: &Tensor,
    mean: &[f32],
    std: &[f32],
    kind: Kind,
) -> Result<Tensor, Error> {
    ffi::normalized_images(borrow(images), mean, std, kind as i8)
        .map(own)
        .map_err(|error| Error::libtorch("normalized_images", &error))
}
