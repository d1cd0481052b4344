//! Gradients: what tch leaves out.

use tch::Tensor;

use crate::bridge::ffi;
use crate::error::Error;

/// Whether operations record what `backward` needs: false inside [`tch::no_grad`].
#[must_use]
pub fn grad_enabled() -> bool {
    ffi::grad_enabled()
}

/// Makes a parameter's gradient undefined, as PyTorch's `zero_grad(set_to_none=True)`.
///
/// # Errors
/// [`Error::Libtorch`] when the tensor cannot have one.
///
/// ```no_run
/// use brigade_torch::{Kind, Tensor, clear_gradient, gradient};
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// weight.sum(Kind::Double).backward();
/// assert!(gradient(&weight)?.is_some());
/// clear_gradient(&weight)?;
/// assert!(gradient(&weight)?.is_none());
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn clear_gradient(parameter: &Tensor) -> Result<(), Error> {
    // SAFETY: the pointer is that of a live tch tensor. Other handles of the gradient keep it alive.
    unsafe { ffi::clear_gradient(parameter.as_ptr().cast()) }
        .map_err(|error| Error::libtorch("clear_gradient", &error))
}

/// A parameter's gradient, or `None` before the first backward pass and after [`clear_gradient`].
///
/// # Errors
/// [`Error::Libtorch`] when the tensor cannot have one.
pub fn gradient(parameter: &Tensor) -> Result<Option<Tensor>, Error> {
    // SAFETY: the pointer is that of a live tch tensor.
    let gradient = unsafe { ffi::gradient(parameter.as_ptr().cast()) }
        .map_err(|error| Error::libtorch("gradient", &error))?;
    if gradient.is_null() {
        return Ok(None);
    }
    // SAFETY: a new handle on the heap, made with the type that tch frees.
    Ok(Some(unsafe { Tensor::from_ptr(gradient.cast()) }))
}
