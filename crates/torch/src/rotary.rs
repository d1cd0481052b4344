//! Rotary position embeddings.

use tch::Tensor;

use crate::bridge::{borrow, ffi, own};
use crate::error::Error;

/// Rotates pairs of features by angles that depend on the position ([RoFormer](https://arxiv.org/abs/2104.09864), with
/// the pairs of GPT-NeoX and Llama): `x · cos + turned(x) · sin`, where `turned` swaps the halves of the last dimension
/// and negates the new first one.
///
/// `x` are queries or keys `[batch, heads, tokens, width]`, `cos` and `sin` tables `[batch or 1, 1, tokens, width]`, which
/// are converted to the kind of `x`. Any shapes that can be broadcast are allowed.
///
/// On a CPU, heads of float32, float64 and bfloat16 are rotated in one pass, and so are their gradients, with the bits of
/// separate operations (`neg`, `cat`, `mul`, `addcmul`), which compute other kinds, other shapes, tables that require a
/// gradient, and other devices.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] with [`crate::Fault::Invalid`] for an odd number of features, and for shapes and
/// devices that do not match.
///
/// ```
/// use brigade_torch::rotary;
/// use tch::{Device, Kind, Tensor};
/// // One head with one pair of features at position 1, rotated by a quarter turn.
/// let x = Tensor::from_slice(&[1f32, 0.0]).view([1, 1, 1, 2]);
/// let (cos, sin) = (Tensor::zeros_like(&x), Tensor::ones_like(&x));
/// let rotated = rotary(&x, &cos, &sin)?;
/// assert_eq!(Vec::<f32>::try_from(rotated.view([2]))?, [0.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor, Error> {
    ffi::rotary(borrow(x), borrow(cos), borrow(sin))
        .map(own)
        .map_err(|error| Error::libtorch("rotary", &error))
}
