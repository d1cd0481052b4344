//! Autocast: chosen operations compute in 16 bits.

use std::fmt;
use std::marker::PhantomData;

use tch::{Device, Kind, Tensor};

use crate::bridge::{borrow, ffi};
use crate::device::{DeviceExt, TPU, tpu_compiled};
use crate::error::Error;

/// A scope in which autocast is on or off for operations of this thread on one type of device: as with
/// `torch.autocast`, libtorch chooses the operations that compute in the 16-bit type. The scope ends when it is
/// dropped, also by a panic. Scopes can be nested.
///
/// ```
/// use brigade_torch::Autocast;
/// use tch::{Device, Kind, Tensor};
/// let weight = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
/// let scope = Autocast::enter(Device::Cpu, Kind::BFloat16, true)?;
/// assert_eq!(weight.matmul(&weight).kind(), Kind::BFloat16);
/// drop(scope);
/// assert_eq!(weight.matmul(&weight).kind(), Kind::Float);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use = "the scope ends when this is dropped"]
pub struct Autocast {
    device: i8,
    before: ffi::AutocastState,
    /// Makes it `!Send`: the state belongs to the thread.
    _here: PhantomData<*const ()>,
}

impl Autocast {
    /// Enters a scope that computes in `kind`, `Half` or `BFloat16`; `Float` turns autocast off in the scope. With
    /// `cache`, a weight that several operations use is cast once. The outermost scope frees the casts at its end, but for
    /// those of [`crate::linear`], [`crate::activation_linear`], [`crate::gated_linear`] and
    /// [`crate::linear_cross_entropy`], which are kept with their weights.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for any other kind, or a device without autocast.
    pub fn enter(device: Device, kind: Kind, cache: bool) -> Result<Self, Error> {
        let device = match device {
            Device::Cpu => 0,
            Device::Cuda(_) => 1,
            TPU if tpu_compiled() => 20,
            Device::Mps => 13,
            Device::Vulkan => {
                return Err(Error::invalid_argument(format!(
                    "autocast: {} has none",
                    device.label()
                )));
            }
        };
        let (enabled, dtype) = match kind {
            Kind::Half => (true, 5),
            Kind::BFloat16 => (true, 15),
            Kind::Float => (false, 15),
            other => {
                return Err(Error::invalid_argument(format!(
                    "autocast: expected Half, BFloat16 or Float, found {other:?}"
                )));
            }
        };
        let next = ffi::AutocastState { enabled, dtype, cache };
        let before = ffi::autocast_enter(device, &next)
            .map_err(|error| Error::libtorch("autocast", &error))?;
        Ok(Self { device, before, _here: PhantomData })
    }

    /// Returns the type in which operations computed before the scope. `None` if autocast was off.
    ///
    /// ```
    /// use brigade_torch::Autocast;
    /// use tch::{Device, Kind};
    /// let _short = Autocast::enter(Device::Cpu, Kind::BFloat16, true)?;
    /// let exact = Autocast::enter(Device::Cpu, Kind::Float, true)?;
    /// assert_eq!(exact.outer_kind(), Some(Kind::BFloat16));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn outer_kind(&self) -> Option<Kind> {
        match (self.before.enabled, self.before.dtype) {
            (true, 5) => Some(Kind::Half),
            (true, 15) => Some(Kind::BFloat16),
            _ => None,
        }
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        ffi::autocast_leave(self.device, &self.before);
    }
}

impl fmt::Debug for Autocast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Autocast").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Returns the 16-bit type in which products of this operand would be computed, by its own type or by autocast, if the
/// processor has no instructions for it: libtorch then emulates them, several times slower than products in float32,
/// and less exactly. `None` if the processor has such instructions, and for products of other types.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for a device without autocast.
pub fn emulated_kind(operand: &Tensor) -> Result<Option<Kind>, Error> {
    match ffi::emulated_type(borrow(operand)) {
        Ok(5) => Ok(Some(Kind::Half)),
        Ok(15) => Ok(Some(Kind::BFloat16)),
        Ok(_) => Ok(None),
        Err(error) => Err(Error::libtorch("emulated_kind", &error)),
    }
}
