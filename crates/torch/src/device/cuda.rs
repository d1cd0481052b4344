//! GPUs through CUDA, and the reasons why this process cannot use them.

use tch::Device;

use super::{DeviceKind, DeviceUnavailable, MemoryInfo, gpu};
use crate::backend::Backend;
use crate::bridge::ffi;
use crate::error::Error;

/// The device kind of NVIDIA's GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Cuda;

impl DeviceKind for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn devices(&self) -> Result<usize, DeviceUnavailable> {
        Ok(cuda_devices()?)
    }

    fn device(&self, index: usize) -> Device {
        Device::Cuda(index)
    }

    fn index(&self, device: Device) -> Option<usize> {
        match device {
            Device::Cuda(index) => Some(index),
            _ => None,
        }
    }

    fn visibility_variable(&self) -> &'static str {
        "CUDA_VISIBLE_DEVICES"
    }

    fn hardware(&self, index: usize) -> Result<String, Error> {
        let index = number(index)?;
        ffi::gpu_hardware(index).map_err(|error| Error::libtorch("hardware", &error))
    }

    fn memory(&self, index: usize) -> Result<MemoryInfo, Error> {
        let ffi::MemoryInfo { free, total } = ffi::gpu_memory(number(index)?)
            .map_err(|error| Error::libtorch("memory of a device", &error))?;
        Ok(MemoryInfo { free, total })
    }

    fn default_backend(&self) -> Backend {
        Backend::Nccl
    }

    fn has_bf16(&self, index: usize) -> Result<bool, Error> {
        ffi::gpu_has_bf16(number(index)?).map_err(|error| Error::libtorch("has_bf16", &error))
    }

    fn has_streams(&self) -> bool {
        true
    }

    fn load(&self) -> Result<(), DeviceUnavailable> {
        Ok(())
    }

    fn synchronize(&self, index: usize) -> Result<(), Error> {
        ffi::synchronize_gpu(number(index)?).map_err(|error| Error::libtorch("synchronize", &error))
    }
}

fn number(index: usize) -> Result<i32, Error> {
    gpu(Device::Cuda(index)).map(Option::unwrap_or_default)
}

/// Returns `true` if this program was built with the feature `cuda`.
#[must_use]
pub fn cuda_compiled() -> bool {
    cfg!(feature = "cuda")
}

/// Reason why no GPU can be used. Its text is a clause such as `there is no NVIDIA driver`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// This program was built without the feature `cuda`.
    #[error("this program was built without the feature cuda")]
    NotCompiled,
    /// The driver's library, `libcuda.so.1`, is not installed.
    #[error("there is no NVIDIA driver")]
    NoDriver,
    /// The driver is older than libtorch's CUDA.
    #[error("the NVIDIA driver is made for CUDA {driver}, and libtorch needs {needed}")]
    DriverTooOld {
        /// Newest CUDA version that the driver supports, such as `12.4`.
        driver: String,
        /// CUDA version that this program was built with, such as `13.0`.
        needed: String,
    },
    /// The driver is installed, but no GPU is available to this process.
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    /// `CUDA_VISIBLE_DEVICES` does not contain a GPU of this machine.
    #[error("CUDA_VISIBLE_DEVICES={0} leaves no GPU")]
    Hidden(String),
    /// CUDA did not start for another reason.
    #[error("CUDA cannot be initialized: {text} (error {code})")]
    Failed {
        /// Number of the `cudaError_t`.
        code: i32,
        /// Error message of CUDA.
        text: String,
    },
}

/// Returns the number of GPUs that this process can use through CUDA, which is never 0. The first call starts the
/// driver, but does not create a context on a GPU.
///
/// # Errors
/// Returns the reason why there is none.
///
/// ```
/// match brigade_torch::cuda_devices() {
///     Ok(devices) => assert!(devices > 0),
///     Err(reason) => assert!(!reason.to_string().is_empty()),
/// }
/// ```
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<usize, CudaUnavailable> {
    let state = ffi::cuda_state();
    judge(
        Facts {
            devices: state.devices,
            error: state.error,
            error_text: &state.error_text,
            driver: state.driver,
            built_for: state.built_for,
        },
        std::env::var("CUDA_VISIBLE_DEVICES").ok(),
    )
}

/// Returns the number of GPUs that this process can use. Without the feature `cuda` this is an error, unless other code
/// has registered devices of that name with libtorch.
///
/// # Errors
/// [`CudaUnavailable::NotCompiled`].
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<usize, CudaUnavailable> {
    match usize::try_from(ffi::registered_gpus()) {
        Ok(devices) if devices > 0 => Ok(devices),
        _ => Err(CudaUnavailable::NotCompiled),
    }
}

/// Facts that the CUDA runtime reports.
#[cfg(any(feature = "cuda", test))]
#[derive(Debug, Clone, Copy)]
struct Facts<'a> {
    devices: i32,
    error: i32,
    error_text: &'a str,
    driver: i32,
    built_for: i32,
}

#[cfg(any(feature = "cuda", test))]
fn judge(facts: Facts<'_>, visible: Option<String>) -> Result<usize, CudaUnavailable> {
    const NO_DEVICE: i32 = 100;
    const INSUFFICIENT_DRIVER: i32 = 35;
    let Facts { devices, error, error_text, driver, built_for } = facts;
    match (error, usize::try_from(devices)) {
        (0, Ok(devices)) if devices > 0 => Ok(devices),
        (INSUFFICIENT_DRIVER, _) if driver == 0 => Err(CudaUnavailable::NoDriver),
        (INSUFFICIENT_DRIVER, _) => Err(CudaUnavailable::DriverTooOld {
            driver: version(driver),
            needed: version(built_for),
        }),
        (0 | NO_DEVICE, _) => {
            Err(visible.map_or(CudaUnavailable::NoDevice, CudaUnavailable::Hidden))
        }
        (code, _) => Err(CudaUnavailable::Failed { code, text: error_text.to_owned() }),
    }
}

/// Formats a version number: `13.0` for 13000.
#[cfg(any(feature = "cuda", test))]
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_told() {
        let good =
            Facts { devices: 2, error: 0, error_text: "", driver: 13_000, built_for: 13_000 };
        let none = Facts { devices: 0, ..good };
        assert_eq!(judge(good, None), Ok(2));
        let told = |facts, visible: Option<&str>| {
            judge(facts, visible.map(str::to_owned)).unwrap_err().to_string()
        };
        let absent = Facts { error: 35, driver: 0, ..none };
        assert_eq!(told(absent, Some("0")), "there is no NVIDIA driver");
        assert_eq!(
            told(Facts { driver: 12_040, ..absent }, None),
            "the NVIDIA driver is made for CUDA 12.4, and libtorch needs 13.0"
        );
        let empty = Facts { error: 100, ..none };
        assert_eq!(told(empty, None), "the NVIDIA driver finds no GPU");
        assert_eq!(told(none, None), "the NVIDIA driver finds no GPU");
        assert_eq!(told(empty, Some("")), "CUDA_VISIBLE_DEVICES= leaves no GPU");
        let broken = Facts { error: 802, error_text: "system not yet initialized", ..none };
        assert_eq!(
            told(broken, None),
            "CUDA cannot be initialized: system not yet initialized (error 802)"
        );
    }

    #[test]
    fn this_machine_is_asked() {
        let found = cuda_devices();
        assert_eq!(cuda_compiled(), found != Err(CudaUnavailable::NotCompiled));
        // Counted in the same way as libtorch does.
        let counted = usize::try_from(tch::Cuda::device_count()).unwrap();
        assert_eq!(found.unwrap_or(0), if cuda_compiled() { counted } else { 0 });
    }
}
