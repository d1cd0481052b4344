//! Convolutions.

use tch::Tensor;

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// Computes the convolution (cross-correlation) of images, as
/// [torch.nn.functional.conv2d](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.conv2d.html): `input`
/// `[n, in, h, w]`, `weight` `[out, in / groups, kernel…]`, `bias` `[out]`; pairs are `[vertical, horizontal]`.
///
/// Under autocast with its cache it takes the 16-bit copy of a float32 weight that [`crate::linear`] describes, in the
/// weight's memory format. Results and gradients are those of libtorch, bit for bit, except that gradients of several
/// uses of a weight are added in float32.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices do not match.
///
/// ```
/// use brigade_torch::convolution2d;
/// use tch::{Device, Kind, Tensor};
/// let options = (Kind::Float, Device::Cpu);
/// let (images, weight) = (Tensor::ones([2, 3, 8, 8], options), Tensor::ones([4, 3, 3, 3], options));
/// let maps = convolution2d(&images, &weight, None, [2, 2], [1, 1], [1, 1], 1)?;
/// assert_eq!((maps.size(), maps.double_value(&[0, 0, 1, 1])), (vec![2, 4, 4, 4], 27.0));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn convolution2d(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: [i64; 2],
    padding: [i64; 2],
    dilation: [i64; 2],
    groups: i64,
) -> Result<Tensor, Error> {
    let (input, weight, bias) = (borrow(input), borrow(weight), borrow_optional(bias));
    ffi::convolution2d(input, weight, &bias, &stride, &padding, &dilation, groups)
        .map(own)
        .map_err(|error| Error::libtorch("convolution2d", &error))
}
