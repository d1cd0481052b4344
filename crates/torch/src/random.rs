//! The states of libtorch's random generators.

use tch::Device;

use crate::bridge::ffi;
use crate::device::{DeviceExt, TPU, gpu, tpu_compiled};
use crate::error::Error;

/// Returns the state of a device's default random generator, which dropout and random tensors use.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if there is no such device; [`crate::ErrorKind::InvalidArgument`] for one that is
/// neither the CPU, a GPU nor a TPU.
///
/// ```
/// use brigade_torch::{rng_state, set_rng_state};
/// use tch::{Device, Kind, Tensor};
/// let state = rng_state(Device::Cpu)?;
/// let first = Tensor::rand([3], (Kind::Float, Device::Cpu));
/// set_rng_state(Device::Cpu, &state)?;
/// assert_eq!(first, Tensor::rand([3], (Kind::Float, Device::Cpu)));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn rng_state(device: Device) -> Result<Vec<u8>, Error> {
    ffi::rng_state(number(device)?).map_err(|error| Error::libtorch("rng_state", &error))
}

/// Restores a state that [`rng_state`] returned, in this or in another process.
///
/// # Errors
/// Returns the same errors as [`rng_state`], and when the bytes are not a state of such a generator.
pub fn set_rng_state(device: Device, state: &[u8]) -> Result<(), Error> {
    ffi::set_rng_state(number(device)?, state)
        .map_err(|error| Error::libtorch("set_rng_state", &error))
}

fn number(device: Device) -> Result<i32, Error> {
    match (device, gpu(device)?) {
        (Device::Cpu, _) => Ok(-1),
        (_, Some(index)) => Ok(index),
        (TPU, _) if tpu_compiled() => {
            device.load()?;
            Ok(-2)
        }
        _ => Err(Error::invalid_argument(format!(
            "random states of {} are not kept",
            device.label()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

    #[test]
    fn a_state_that_was_put_back_draws_the_same() {
        let options = (Kind::Double, Device::Cpu);
        // An odd number of normal values leaves one in the generator's own cache.
        let _ = Tensor::randn([3], options);
        let state = rng_state(Device::Cpu).unwrap();
        let draw = || (Tensor::rand([5], options), Tensor::randn([5], options));
        let first = draw();
        assert_ne!(first, draw());
        set_rng_state(Device::Cpu, &state).unwrap();
        assert_eq!(first, draw());
        assert!(set_rng_state(Device::Cpu, &state[1..]).is_err());
        assert!(rng_state(Device::Vulkan).is_err());
    }
}
