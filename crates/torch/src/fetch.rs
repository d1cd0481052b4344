//! Asynchronous copy of a number from a device to the host.

use std::fmt;

use cxx::UniquePtr;
use tch::{Kind, Tensor};

use crate::bridge::{borrow, ffi};
use crate::error::Error;

/// An asynchronous copy of one integer from a device to the host, which does not block the device.
///
/// ```
/// use brigade_torch::Fetch;
/// use tch::Tensor;
///
/// let fetch = Fetch::start(&Tensor::from_slice(&[7i64]))?;
/// assert_eq!(fetch.wait()?, 7);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct Fetch(UniquePtr<ffi::Fetch>);

// SAFETY: a tensor on the host (atomic count) that nothing else refers to, and an event, which CUDA lets
// any thread wait for.
unsafe impl Send for Fetch {}

impl Fetch {
    /// Starts to copy a tensor of one `int64` value to the host. The copy runs after all work that was queued on the
    /// device before.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if the tensor is not one `int64` value; [`crate::TorchError::Libtorch`] if
    /// the device fails.
    pub fn start(tensor: &Tensor) -> Result<Self, Error> {
        if tensor.f_kind()? != Kind::Int64 || tensor.numel() != 1 {
            return Err(Error::invalid_argument(format!(
                "a fetch is of one int64, found {:?} of shape {:?}",
                tensor.f_kind()?,
                tensor.size()
            )));
        }
        ffi::start_fetch(borrow(tensor))
            .map(Self)
            .map_err(|error| Error::libtorch("start_fetch", &error))
    }

    /// Waits for the copy and returns the integer. Work that was queued after the start is not waited for.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn wait(&self) -> Result<i64, Error> {
        ffi::fetched_number(&self.0).map_err(|error| Error::libtorch("fetch", &error))
    }
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fetch")
    }
}
