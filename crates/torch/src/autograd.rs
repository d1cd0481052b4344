//! Gradients: what tch leaves out.

use tch::Tensor;

use crate::bridge::{borrow, ffi, own};
use crate::error::Error;

/// Whether operations record what `backward` needs: false inside [`tch::no_grad`].
#[must_use]
pub fn grad_enabled() -> bool {
    ffi::grad_enabled()
}

/// Computes the gradients of a scalar with respect to all that it was computed from, and adds them to the
/// leaves' gradients: [`Tensor::backward`], with errors of their kind. Where a [`crate::Reducer`] takes
/// part, use [`crate::ProcessGroup::backward`].
///
/// # Errors
/// [`Error::Libtorch`] when the loss is not a scalar or has no graph.
///
/// ```no_run
/// use brigade_torch::{Tensor, backward, gradient};
/// let weight = Tensor::from(3.0).set_requires_grad(true);
/// backward(&(&weight * &weight))?;
/// assert_eq!(gradient(&weight)?.unwrap().double_value(&[]), 6.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn backward(loss: &Tensor) -> Result<(), Error> {
    ffi::backward(borrow(loss)).map_err(|error| Error::libtorch("backward", &error))
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
    ffi::clear_gradient(borrow(parameter))
        .map_err(|error| Error::libtorch("clear_gradient", &error))
}

/// A parameter's gradient, or `None` before the first backward pass and after [`clear_gradient`].
///
/// # Errors
/// [`Error::Libtorch`] when the tensor cannot have one.
pub fn gradient(parameter: &Tensor) -> Result<Option<Tensor>, Error> {
    let gradient =
        ffi::gradient(borrow(parameter)).map_err(|error| Error::libtorch("gradient", &error))?;
    Ok((!gradient.is_null()).then(|| own(gradient)))
}

/// Gives a parameter a gradient, in place of the one it had: a checkpoint within an accumulation window.
///
/// # Errors
/// [`Error::Libtorch`] when the parameter cannot have one; [`Error::Misuse`] when shape, kind or device
/// are not the parameter's.
pub fn set_gradient(parameter: &Tensor, gradient: &Tensor) -> Result<(), Error> {
    let (expected, found) = (parameter.size(), gradient.size());
    let alike = parameter.f_kind()? == gradient.f_kind()?
        && parameter.device() == gradient.device()
        && expected == found;
    if !alike {
        return Err(Error::Misuse(format!(
            "a gradient has its parameter's shape, kind and device: expected {expected:?} of {:?}, \
             found {found:?} of {:?}",
            parameter.f_kind()?,
            gradient.f_kind()?
        )));
    }
    ffi::set_gradient(borrow(parameter), borrow(gradient))
        .map_err(|error| Error::libtorch("set_gradient", &error))
}
