//! Scopes that hide warnings of libtorch.

use std::fmt;
use std::marker::PhantomData;

use cxx::UniquePtr;

use crate::bridge::ffi;
use crate::error::Error;

/// A scope in which warnings of this thread that contain a text are not shown, like Python's `warnings.filterwarnings`.
/// libtorch would write a warning to the standard error at each call. Scopes end in the reverse order.
///
/// ```
/// use brigade_torch::WarningFilter;
/// use tch::{Device, Kind, Tensor};
/// let filter = WarningFilter::enter("degrees of freedom is <= 0")?;
/// let deviation = Tensor::ones([1], (Kind::Float, Device::Cpu)).std(true);
/// drop(filter);
/// assert!(deviation.double_value(&[]).is_nan());
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use = "the scope ends when this is dropped"]
pub struct WarningFilter {
    #[expect(dead_code, reason = "its destructor ends the scope")]
    handle: UniquePtr<ffi::WarningFilter>,
    /// Makes it `!Send`: libtorch keeps the state with the thread.
    _here: PhantomData<*const ()>,
}

impl WarningFilter {
    /// Enters a scope that hides warnings containing `text`.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if memory runs out.
    pub fn enter(text: &str) -> Result<Self, Error> {
        let handle = ffi::filter_warnings(text)
            .map_err(|error| Error::libtorch("filter_warnings", &error))?;
        Ok(Self { handle, _here: PhantomData })
    }
}

impl fmt::Debug for WarningFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WarningFilter")
    }
}
