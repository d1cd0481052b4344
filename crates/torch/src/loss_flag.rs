//! Signal of a non-finite loss to the other ranks, as part of the reduced gradients.

use std::fmt;

use cxx::UniquePtr;
use tch::Tensor;

use crate::bridge::{borrow, borrow_all, ffi, own};
use crate::error::Error;

/// A flag for a non-finite loss: puts NaN into one element of a gradient in the next backward of one model, so that all
/// ranks detect after the reduction that a loss of one of them was not finite. No extra message is sent.
///
/// Call [`LossFlag::raise`] before the backward and [`LossFlag::lower`] after it. The NaN is in the first element of
/// the first gradient that the backward computes, where [`first_elements_are_finite`] detects it.
///
/// ```
/// use brigade_torch::{LossFlag, first_elements_are_finite, gradient};
/// use tch::{Kind, Tensor};
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let flag = LossFlag::new(&[&weight])?;
/// flag.raise(&Tensor::from(f64::NAN));
/// weight.sum(Kind::Double).backward();
/// assert!(flag.lower(), "the backward has reached the model");
/// let gradient = gradient(&weight)?.expect("backward has reached it");
/// assert!(!first_elements_are_finite(&[&gradient])?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct LossFlag(UniquePtr<ffi::LossFlag>);

// SAFETY: a counted pointer (atomic count) to a state of atomics and a tensor behind a mutex, which autograd's
// threads use as well.
unsafe impl Send for LossFlag {}
// SAFETY: see above; no function changes it but under that mutex.
unsafe impl Sync for LossFlag {}

impl LossFlag {
    /// Creates a flag, and installs hooks on the gradients of a model's parameters, which exist as long as the
    /// parameters.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] for a parameter that has no gradient.
    pub fn new(parameters: &[&Tensor]) -> Result<Self, Error> {
        ffi::new_loss_flag(&borrow_all(parameters))
            .map(Self)
            .map_err(|error| Error::libtorch("LossFlag::new", &error))
    }

    /// Sets a scalar that is added to the first element of the first gradient that the next backward computes: NaN, or
    /// a tensor on a device that is 0 or NaN, for whose value the host does not wait.
    pub fn raise(&self, value: &Tensor) {
        ffi::loss_flag_raise(&self.0, borrow(value));
    }

    /// Ends the effect of [`LossFlag::raise`]. Returns `true` if a backward has reached the model since the last call.
    #[must_use]
    pub fn lower(&self) -> bool {
        ffi::loss_flag_lower(&self.0)
    }
}

/// Returns `true` if the first element of each tensor is finite. Waits for devices.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when a device has failed.
pub fn first_elements_are_finite(tensors: &[&Tensor]) -> Result<bool, Error> {
    ffi::first_elements_are_finite(&borrow_all(tensors))
        .map_err(|error| Error::libtorch("first_elements_are_finite", &error))
}

/// Computes on the tensors' device, without waiting for it, whether their first elements are finite: an int64 `[1]`, 1
/// if one is not finite.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for tensors of several devices.
pub fn first_elements_not_finite(tensors: &[&Tensor]) -> Result<Tensor, Error> {
    ffi::first_elements_not_finite(&borrow_all(tensors))
        .map(own)
        .map_err(|error| Error::libtorch("first_elements_not_finite", &error))
}

impl fmt::Debug for LossFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LossFlag")
    }
}
