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
/// On an NVIDIA GPU of compute capability 8.0 or newer, heads of bfloat16, float16 and float32 are rotated by one kernel, and
/// so are their gradients. It computes in float32, and reads tables of the heads' kind or of float32 without a conversion.
///
/// On a CPU, heads of float32, float64 and bfloat16 are rotated in one pass, and so are their gradients, with the bits of
/// separate operations (`neg`, `cat`, `mul`, `addcmul`), which compute other kinds, other shapes, tables that require a
/// gradient, gradients of gradients, and other devices.
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

/// Rotates queries and keys, as [`rotary`] does each of them. On a GPU both are one kernel, and both gradients.
///
/// `queries` `[batch, heads, tokens, width]` and `keys` `[batch, key heads, tokens, width]` may have different numbers of
/// heads.
///
/// # Errors
/// Returns the errors of [`rotary`].
///
/// ```
/// use brigade_torch::{rotary, rotary_pair};
/// use tch::{Device, Kind, Tensor};
/// let random = |heads: i64| Tensor::randn([2, heads, 5, 8], (Kind::Float, Device::Cpu));
/// let (queries, keys) = (random(4), random(2));
/// let angles = Tensor::randn([1, 1, 5, 8], (Kind::Float, Device::Cpu));
/// let (cos, sin) = (angles.cos(), angles.sin());
/// let (rotated, rotated_keys) = rotary_pair(&queries, &keys, &cos, &sin)?;
/// assert_eq!(rotated, rotary(&queries, &cos, &sin)?);
/// assert_eq!(rotated_keys, rotary(&keys, &cos, &sin)?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn rotary_pair(
    queries: &Tensor,
    keys: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<(Tensor, Tensor), Error> {
    ffi::rotary_pair(borrow(queries), borrow(keys), borrow(cos), borrow(sin))
        .map(|ffi::RotatedPair { queries, keys }| (own(queries), own(keys)))
        .map_err(|error| Error::libtorch("rotary_pair", &error))
}

/// Rotates the first heads of the packed product of attention's projections, such as the queries and keys in front of
/// the values, as [`rotary`] does.
///
/// `product` `[batch, tokens, all heads · width]` is replaced by the product with the rotated heads; `cos` and `sin` are
/// tables `[batch or 1, 1, tokens, width]`. On a GPU with the kernels of [`rotary`] it is rotated in place: nothing else is
/// read or written, and what attention keeps for the backward is the product alone. Other handles of the tensor then see
/// the rotated heads, so an operation whose backward needs the product, unlike that of a linear layer, fails. A leaf that
/// requires a gradient, and a view of such a tensor, keep their values. The gradient is one kernel, too. Without the kernels
/// a new product is made of the rotated heads and the others.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] with [`crate::Fault::Invalid`] for a product whose last dimension is not a number of
/// heads of the tables' width, at least `heads`; and the errors of [`rotary`]. `product` is then unchanged.
///
/// ```
/// use brigade_torch::{rotary, rotary_packed};
/// use tch::{Device, Kind, Tensor};
/// // One head each of queries, keys and values, of width 4.
/// let mut product = Tensor::randn([2, 5, 12], (Kind::Float, Device::Cpu));
/// let angles = Tensor::randn([1, 1, 5, 4], (Kind::Float, Device::Cpu));
/// let (cos, sin) = (angles.cos(), angles.sin());
/// let queries = rotary(&product.narrow(2, 0, 4).unsqueeze(1), &cos, &sin)?;
/// let values = product.narrow(2, 8, 4).copy();
/// rotary_packed(&mut product, 2, &cos, &sin)?;
/// assert_eq!(product.narrow(2, 0, 4), queries.squeeze_dim(1));
/// assert_eq!(product.narrow(2, 8, 4), values);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn rotary_packed(
    product: &mut Tensor,
    heads: i64,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<(), Error> {
    *product = ffi::rotary_packed(borrow(product), heads, borrow(cos), borrow(sin))
        .map(own)
        .map_err(|error| Error::libtorch("rotary_packed", &error))?;
    Ok(())
}
