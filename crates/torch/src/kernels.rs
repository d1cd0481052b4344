//! GPU kernels of Brigade: which ones are used, and their compiled code.

use std::path::Path;

use brigade_dylib_call::Nvrtc;
use brigade_kernels::{Cache, Element, FILES, FUSED_VARIABLE, File, Fused, Variant};
use tch::{Device, Kind};

use crate::bridge::ffi;
use crate::device::{cuda_compiled, gpu};
use crate::error::{Error, ErrorKind};

/// State of one file of GPU kernels on a device, as [`prepare_kernels`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelState {
    /// Name of the kernels, as in `BRIGADE_FUSED`.
    pub name: String,
    /// Reason why libtorch's kernels are used instead, such as `compute capability 7.5, needs 8.0`. `None` if Brigade's
    /// are used.
    pub reason: Option<String>,
}

/// Compiles Brigade's GPU kernels for a type of elements, several files at a time, or reads their code from the user's
/// cache (`$XDG_CACHE_HOME/brigade/kernels`, by default in `~/.cache`). Without a call each file is compiled at its first
/// use.
///
/// Returns the state of each file. Kernels that do not run on this GPU, or that `BRIGADE_FUSED` turns off, are replaced
/// by libtorch's operations. Returns nothing for a device that is not a GPU, and without the feature `cuda`.
///
/// # Errors
/// Returns an error if `BRIGADE_FUSED` has an unknown name, and if CUDA fails.
pub fn prepare_kernels(device: Device, kind: Kind) -> Result<Vec<KernelState>, Error> {
    check_fused()?;
    let Some(gpu) = gpu(device)?.filter(|_| cuda_compiled()) else { return Ok(Vec::new()) };
    let states = ffi::prepare_kernels(gpu, kind as i8)
        .map_err(|error| Error::libtorch("prepare_kernels", &error))?;
    Ok(states
        .into_iter()
        .map(|ffi::KernelState { file, reason }| KernelState {
            name: file,
            reason: (!reason.is_empty()).then_some(reason),
        })
        .collect())
}

/// Checks the environment variable `BRIGADE_FUSED`: nothing or `1` for all GPU kernels, `0` for none, or names with a
/// minus sign, separated by commas, for all but these.
///
/// # Errors
/// Returns an error that lists the names if the variable has an unknown one.
pub fn check_fused() -> Result<(), Error> {
    fused().map(drop)
}

fn fused() -> Result<Fused, Error> {
    Fused::from_env().map_err(|error| Error::new(ErrorKind::InvalidArgument, error))
}

fn file(name: &str) -> Result<&'static File, Error> {
    File::find(name)
        .ok_or_else(|| Error::invalid_argument(format!("there is no file of kernels {name}")))
}

fn element(number: i32) -> Option<Element> {
    Element::ALL.into_iter().find(|element| i64::from(element.number()) == i64::from(number))
}

pub(crate) fn kernel_files() -> Vec<String> {
    FILES.iter().map(|file| file.name.to_owned()).collect()
}

pub(crate) fn kernel_obstacle(name: &str, number: i32, capability: i32) -> Result<String, Error> {
    if !fused()?.contains(name) {
        return Ok(format!("off by {FUSED_VARIABLE}"));
    }
    let obstacle = file(name)?.obstacle(element(number), capability.unsigned_abs());
    Ok(obstacle.unwrap_or_default())
}

pub(crate) fn kernel_code(
    name: &str,
    number: i32,
    capability: i32,
    nvrtc: &str,
) -> Result<ffi::KernelCode, Error> {
    let element = element(number)
        .ok_or_else(|| Error::invalid_argument(format!("there is no type {number} of elements")))?;
    let variant = Variant { file: file(name)?, element, capability: capability.unsigned_abs() };
    let failed = |error: &dyn std::fmt::Display| Error::invalid_argument(error.to_string());
    let compiler = Nvrtc::load(Path::new(nvrtc)).map_err(|error| failed(&error))?;
    let code = Cache::of_user().code(&variant, &compiler).map_err(|error| failed(&error))?;
    Ok(ffi::KernelCode { code: code.bytes, remark: code.remark.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_has_no_gpu_kernels() {
        assert_eq!(prepare_kernels(Device::Cpu, Kind::BFloat16).unwrap(), []);
    }

    #[test]
    fn obstacles_are_reported_and_unknown_files_are_errors() {
        assert_eq!(kernel_obstacle("norm_relu", 0, 90).unwrap(), "");
        assert_eq!(kernel_obstacle("norm_relu", -1, 90).unwrap(), "needs bfloat16 or float16");
        assert!(kernel_obstacle("nothing", 0, 90).is_err());
        assert!(kernel_code("norm_relu", 0, 90, "/nothing/libnvrtc.so").is_err());
        assert_eq!(kernel_files().len(), FILES.len());
    }
}
