//! Operations on lists of gradients: unscaling, norm, clipping. They change tensors in place, without a graph.

use tch::{Kind, Tensor};

use crate::bridge::{borrow, borrow_all, ffi, own};
use crate::error::Error;

/// Multiplies the gradients by `inverse_scale`. Returns a float32 tensor `[1]` on their device: 1 if any value was
/// infinite or NaN, else 0.
///
/// ```
/// use brigade_torch::gradients;
/// use tch::Tensor;
/// let gradient = Tensor::from_slice(&[2f32, f32::INFINITY]);
/// let found = gradients::unscale(&[&gradient], 0.5)?;
/// assert_eq!(found.double_value(&[0]), 1.0);
/// assert_eq!(gradient.double_value(&[0]), 1.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if there are no gradients, or if they are on several devices.
pub fn unscale(gradients: &[&Tensor], inverse_scale: f64) -> Result<Tensor, Error> {
    let found = ffi::unscale_gradients(&borrow_all(gradients), inverse_scale)
        .map_err(|error| Error::libtorch("unscaling gradients", &error))?;
    Ok(own(found))
}

/// Divides the gradients by a scale on their device, a float32 of one element whose value the host does not wait for.
/// Returns the same flag as [`unscale`].
///
/// ```
/// use brigade_torch::gradients;
/// use tch::Tensor;
/// let gradient = Tensor::from_slice(&[2f32, f32::NAN]);
/// let found = gradients::unscale_by(&[&gradient], &Tensor::from(2f32))?;
/// assert_eq!((found.double_value(&[0]), gradient.double_value(&[0])), (1.0, 1.0));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`unscale`].
pub fn unscale_by(gradients: &[&Tensor], scale: &Tensor) -> Result<Tensor, Error> {
    // Divides as PyTorch's scaler does, because scales need not be powers of two.
    let inverse = scale.f_to_kind(Kind::Double)?.f_reciprocal()?.f_to_kind(Kind::Float)?;
    let found = ffi::unscale_gradients_by(&borrow_all(gradients), borrow(&inverse))
        .map_err(|error| Error::libtorch("unscaling gradients", &error))?;
    Ok(own(found))
}

/// Computes the p-norm of all values together, a scalar on their device. `p` may be infinite. Without values it is 0.
///
/// ```
/// use brigade_torch::gradients;
/// use tch::Tensor;
/// let (a, b) = (Tensor::from_slice(&[3.0]), Tensor::from_slice(&[0.0, -4.0]));
/// assert_eq!(gradients::norm(&[&a, &b], 2.0)?.double_value(&[]), 5.0);
/// assert_eq!(gradients::norm(&[&a, &b], f64::INFINITY)?.double_value(&[]), 4.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for tensors of several devices.
pub fn norm(tensors: &[&Tensor], p: f64) -> Result<Tensor, Error> {
    let norm = ffi::norm_of_all(&borrow_all(tensors), p)
        .map_err(|error| Error::libtorch("norm of gradients", &error))?;
    Ok(own(norm))
}

/// Multiplies all tensors by a scalar tensor, which may be on their device: the host does not wait for its value.
///
/// ```
/// use brigade_torch::gradients;
/// use tch::Tensor;
/// let weight = Tensor::from(3f32);
/// gradients::multiply(&[&weight], &Tensor::from(0.5))?;
/// assert_eq!(weight.double_value(&[]), 1.5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if libtorch fails.
pub fn multiply(tensors: &[&Tensor], factor: &Tensor) -> Result<(), Error> {
    ffi::multiply_all(&borrow_all(tensors), borrow(factor))
        .map_err(|error| Error::libtorch("scaling tensors", &error))
}

/// Clamps every value to `[-limit, limit]`.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if libtorch fails.
pub fn clamp(tensors: &[&Tensor], limit: f64) -> Result<(), Error> {
    ffi::clamp_all(&borrow_all(tensors), limit)
        .map_err(|error| Error::libtorch("clamping gradients", &error))
}
