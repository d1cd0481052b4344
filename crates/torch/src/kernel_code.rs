//! Code of the GPU kernels that C++ asks for.

use std::path::Path;

use brigade_dylib_call::Nvrtc;
use brigade_kernels::{Cache, EPILOGUES, Element, FILES, FUSED_VARIABLE, File, Fused, Variant};

use crate::error::{Error, ErrorKind};

/// Returns the kernels that `BRIGADE_FUSED` allows.
///
/// # Errors
/// Returns an error that lists the names if the variable has an unknown one.
pub(crate) fn fused() -> Result<Fused, Error> {
    Fused::from_env().map_err(|error| Error::new(ErrorKind::InvalidArgument, error))
}

/// Returns `true` if products may have epilogues.
pub(crate) fn allows_epilogues() -> Result<bool, Error> {
    Ok(fused()?.contains(EPILOGUES))
}

fn file(name: &str) -> Result<&'static File, Error> {
    File::find(name)
        .ok_or_else(|| Error::invalid_argument(format!("there is no file of kernels {name}")))
}

fn element(number: i32) -> Option<Element> {
    Element::ALL.into_iter().find(|element| i64::from(element.number()) == i64::from(number))
}

/// Returns the names of the files of GPU kernels.
pub(crate) fn kernel_files() -> Vec<String> {
    FILES.iter().map(|file| file.name.to_owned()).collect()
}

/// Returns the reason why a file's kernels are not used for a type and a compute capability; empty if they are.
pub(crate) fn kernel_obstacle(name: &str, number: i32, capability: i32) -> Result<String, Error> {
    if !fused()?.contains(name) {
        return Ok(format!("off by {FUSED_VARIABLE}"));
    }
    let obstacle = file(name)?.obstacle(element(number), capability.unsigned_abs());
    Ok(obstacle.unwrap_or_default())
}

/// Returns the code of a file's kernels, from the cache or from the compiler in a library, and a remark about the cache.
pub(crate) fn compiled_code(
    name: &str,
    number: i32,
    capability: i32,
    nvrtc: &str,
) -> Result<(Vec<u8>, String), Error> {
    let element = element(number)
        .ok_or_else(|| Error::invalid_argument(format!("there is no type {number} of elements")))?;
    let variant = Variant { file: file(name)?, element, capability: capability.unsigned_abs() };
    let failed = |error: &dyn std::fmt::Display| Error::invalid_argument(error.to_string());
    let compiler = Nvrtc::load(Path::new(nvrtc)).map_err(|error| failed(&error))?;
    let code = Cache::of_user().code(&variant, &compiler).map_err(|error| failed(&error))?;
    Ok((code.bytes, code.remark.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn obstacles_are_reported_and_unknown_files_are_errors() {
        assert_eq!(kernel_obstacle("norm_relu", 0, 90).unwrap(), "");
        assert_eq!(kernel_obstacle("norm_relu", -1, 90).unwrap(), "needs bfloat16 or float16");
        assert!(kernel_obstacle("nothing", 0, 90).is_err());
        assert!(compiled_code("norm_relu", 0, 90, "/nothing/libnvrtc.so").is_err());
        assert_eq!(kernel_files().len(), FILES.len());
    }
}
