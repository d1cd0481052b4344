//! GPU kernels of Brigade: which ones are used, and their compiled code.

use tch::{Device, Kind};

use crate::bridge::ffi;
use crate::device::{cuda_compiled, gpu};
use crate::error::Error;
use crate::kernel_code::fused;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_has_no_gpu_kernels() {
        assert_eq!(prepare_kernels(Device::Cpu, Kind::BFloat16).unwrap(), []);
    }
}
