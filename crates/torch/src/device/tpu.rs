//! Google's TPUs through TorchTPU's backend for libtorch, and the reasons why this process cannot use them.

use std::sync::atomic::{AtomicBool, Ordering};

use tch::Device;

use super::{DeviceKind, DeviceUnavailable, MemoryInfo};
use crate::backend::{Backend, GlooDevice};
use crate::error::Error;

/// The device kind of Google's TPUs (experimental), for programs with the feature `tpu`. A process uses one chip.
///
/// tch has no name for them: a TPU is its [`Device::Mps`], which [`DeviceExt::label`](super::DeviceExt::label) shows as
/// `tpu:0`. [`TPU`] is the constant for it.
#[derive(Debug, Clone, Copy)]
pub struct Tpu;

/// The TPU of this process, in programs with the feature `tpu`. An `Accelerator` and a model that is built or moved there
/// load TorchTPU; a program without them calls [`DeviceExt::load`](super::DeviceExt::load) before its first tensor there.
///
/// ```
/// use brigade_torch::{DeviceExt, TPU, tpu_compiled};
/// assert_eq!(TPU.device_kind().is_some(), tpu_compiled());
/// ```
pub const TPU: Device = Device::Mps;

impl DeviceKind for Tpu {
    fn name(&self) -> &'static str {
        "tpu"
    }

    fn devices(&self) -> Result<usize, DeviceUnavailable> {
        loaded()?;
        // tch's device has no index.
        Ok(1)
    }

    fn device(&self, _index: usize) -> Device {
        TPU
    }

    fn index(&self, device: Device) -> Option<usize> {
        (tpu_compiled() && device == TPU).then_some(0)
    }

    fn visibility_variable(&self) -> &'static str {
        "TPU_VISIBLE_CHIPS"
    }

    fn hardware(&self, _index: usize) -> Result<String, Error> {
        Ok(loaded()?.plugin.clone())
    }

    fn memory(&self, _index: usize) -> Result<MemoryInfo, Error> {
        loaded()?;
        Err(Error::invalid_argument("TorchTPU does not report the memory of a TPU"))
    }

    fn default_backend(&self) -> Backend {
        Backend::Gloo(GlooDevice::Default)
    }

    fn has_bf16(&self, _index: usize) -> Result<bool, Error> {
        Ok(true)
    }

    fn has_streams(&self) -> bool {
        false
    }

    fn load(&self) -> Result<(), DeviceUnavailable> {
        loaded()?;
        Ok(prepare_thread()?)
    }

    fn synchronize(&self, _index: usize) -> Result<(), Error> {
        loaded()?;
        synchronize()
    }
}

/// Returns `true` if this program was built with the feature `tpu`.
#[must_use]
pub fn tpu_compiled() -> bool {
    cfg!(feature = "tpu")
}

/// Makes this process a rank of TorchTPU's process group ([`Backend::Tpu`]) when TorchTPU is loaded: its chip is one of a
/// slice with one rank on each chip, whose shape and addresses the launcher's variables have (`TPU_PROCESS_BOUNDS` and
/// `TPU_PROCESS_ADDRESSES`, or `TORCH_TPU_TOPOLOGY` and `TORCH_TPU_SLICEBUILDER_ADDRESSES`). An `Accelerator` with this
/// backend calls it.
///
/// # Errors
/// Returns an error if TorchTPU was loaded before for this process alone.
pub fn join_tpu_slice() -> Result<(), Error> {
    if JOINS_SLICE.load(Ordering::Relaxed) {
        return Ok(());
    }
    if !LOADED.load(Ordering::Relaxed) {
        JOINS_SLICE.store(true, Ordering::Relaxed);
        return Ok(());
    }
    Err(Error::invalid_argument(
        "TorchTPU was loaded for this process alone, and cannot join the other ranks: use the TPU after the \
         Accelerator is built",
    ))
}

/// `true` if this process is to be a rank of TorchTPU's process group.
static JOINS_SLICE: AtomicBool = AtomicBool::new(false);

/// `true` from when this process begins to load TorchTPU.
static LOADED: AtomicBool = AtomicBool::new(false);

/// Reason why no TPU can be used. Its text is a clause such as `there is no TPU`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TpuUnavailable {
    /// This program was built without the feature `tpu`.
    #[error("this program was built without the feature tpu")]
    NotCompiled,
    /// TorchTPU, or a plug-in for it, is not installed for this user.
    #[error("TorchTPU is not installed: run `brigade setup --tpu`")]
    NotInstalled,
    /// The plug-in is one for TPUs, and this machine has none.
    #[error("there is no TPU")]
    NoDevice,
    /// TorchTPU has no library for the libtorch of this program.
    #[error(
        "TorchTPU {torch_tpu} is not made for libtorch {libtorch}, with which this program was built"
    )]
    OtherLibtorch {
        /// Version of TorchTPU.
        torch_tpu: String,
        /// Version of libtorch.
        libtorch: String,
    },
    /// The plug-in has another version of PJRT's C API than TorchTPU.
    #[error(
        "{plugin} has PJRT's C API {found}, and TorchTPU needs {needed} or a later minor version"
    )]
    OtherPlugin {
        /// Path of the plug-in.
        plugin: String,
        /// Version of its API, such as `0.115`.
        found: String,
        /// Smallest version that is sufficient.
        needed: String,
    },
    /// The plug-in's devices belong to no slice, in which ranks of [`Backend::Tpu`] exchange data.
    #[error(
        "the devices of {plugin} exchange no data with those of other processes, as `Backend::Tpu` needs: use \
         `Backend::Gloo`"
    )]
    NoSlice {
        /// Path of the plug-in.
        plugin: String,
    },
    /// TorchTPU or the plug-in could not be loaded, for example because a function is missing in it.
    #[error("TorchTPU cannot be loaded: {detail}")]
    Failed {
        /// Error message of the loader, of TorchTPU or of the plug-in.
        detail: String,
    },
}

/// A loaded backend.
#[derive(Debug, Clone)]
struct Loaded {
    /// Name and version of the plug-in.
    plugin: String,
}

#[cfg(not(feature = "tpu"))]
fn loaded() -> Result<&'static Loaded, TpuUnavailable> {
    Err(TpuUnavailable::NotCompiled)
}

#[cfg(not(feature = "tpu"))]
fn prepare_thread() -> Result<(), TpuUnavailable> {
    Ok(())
}

#[cfg(feature = "tpu")]
fn prepare_thread() -> Result<(), TpuUnavailable> {
    crate::bridge::ffi::prepare_tpu_thread()
        .map_err(|error| TpuUnavailable::Failed { detail: detail(&error) })
}

#[cfg(not(feature = "tpu"))]
fn synchronize() -> Result<(), Error> {
    Err(TpuUnavailable::NotCompiled.into())
}

#[cfg(feature = "tpu")]
fn synchronize() -> Result<(), Error> {
    crate::bridge::ffi::synchronize_tpu().map_err(|error| Error::libtorch("synchronize", &error))
}

/// Loads TorchTPU with the first call; later calls return the same result.
#[cfg(feature = "tpu")]
fn loaded() -> Result<&'static Loaded, TpuUnavailable> {
    use std::sync::OnceLock;

    static STATE: OnceLock<Result<Loaded, TpuUnavailable>> = OnceLock::new();
    STATE.get_or_init(load).as_ref().map_err(Clone::clone)
}

#[cfg(feature = "tpu")]
fn load() -> Result<Loaded, TpuUnavailable> {
    use brigade_hardware::{host_root, may_have_devices_for_one_process};
    use brigade_libtorch_setup::TpuFiles;

    use crate::bridge::ffi;

    LOADED.store(true, Ordering::Relaxed);
    let failed = |error: &cxx::Exception| TpuUnavailable::Failed { detail: detail(error) };
    let files = TpuFiles::find().ok_or(TpuUnavailable::NotInstalled)?;
    let plugin = files.plugin().ok_or(TpuUnavailable::NotInstalled)?;
    // Google's own for TPUs, which takes TorchTPU's options and has its attention.
    let is_libtpu = plugin.file_name().is_some_and(|name| name == "libtpu.so");
    if is_libtpu && !may_have_devices_for_one_process(&host_root()) {
        return Err(TpuUnavailable::NoDevice);
    }
    let joins_slice = JOINS_SLICE.load(Ordering::Relaxed);
    if joins_slice && !is_libtpu {
        return Err(TpuUnavailable::NoSlice { plugin: plugin.display().to_string() });
    }
    let libtorch = crate::libtorch_version();
    let glue = files.glue(&libtorch).ok_or_else(|| TpuUnavailable::OtherLibtorch {
        torch_tpu: files.version().to_owned(),
        libtorch,
    })?;
    let name = plugin.file_name().unwrap_or_default().to_string_lossy();
    let (plugin, glue, base) = (path(&plugin)?, path(&glue)?, files.base());
    let version = ffi::pjrt_version(plugin).map_err(|error| failed(&error))?;
    check(plugin, (version.major, version.minor))?;
    ffi::load_tpu(&ffi::TpuFiles {
        carried: CARRIED,
        base: path(&base)?,
        glue,
        plugin,
        wraps_plugin: !is_libtpu,
        joins_slice,
    })
    .map_err(|error| failed(&error))?;
    Ok(Loaded { plugin: format!("{name}, PJRT {}.{}", version.major, version.minor) })
}

/// The library with what TorchTPU's libraries need of their surroundings.
#[cfg(feature = "tpu")]
static CARRIED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libbrigade_tpu.so"));

/// Major and smallest minor version of PJRT's C API that TorchTPU was tried with.
#[cfg(any(feature = "tpu", test))]
const PJRT: (i32, i32) = (0, 115);

/// Compares the version of a plug-in's API with that of TorchTPU.
#[cfg(any(feature = "tpu", test))]
fn check(plugin: &str, found: (i32, i32)) -> Result<(), TpuUnavailable> {
    if found.0 == PJRT.0 && found.1 >= PJRT.1 {
        return Ok(());
    }
    let version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
    Err(TpuUnavailable::OtherPlugin {
        plugin: plugin.to_owned(),
        found: version(found),
        needed: version(PJRT),
    })
}

/// Returns the first line of an exception's text; libtorch's backtrace follows it.
#[cfg(feature = "tpu")]
fn detail(error: &cxx::Exception) -> String {
    let detail = crate::error::Thrown::read(error).detail;
    detail.lines().next().unwrap_or_default().to_owned()
}

#[cfg(feature = "tpu")]
fn path(path: &std::path::Path) -> Result<&str, TpuUnavailable> {
    path.to_str().ok_or_else(|| TpuUnavailable::Failed {
        detail: format!("the path {} is not UTF-8", path.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_of_another_version_is_refused() {
        assert_eq!(check("libtpu.so", (0, 115)), Ok(()));
        assert_eq!(check("libtpu.so", (0, 200)), Ok(()));
        for found in [(0, 114), (1, 115)] {
            let refused = check("libtpu.so", found).unwrap_err().to_string();
            let expected = format!(
                "libtpu.so has PJRT's C API {}.{}, and TorchTPU needs 0.115 or a later minor version",
                found.0, found.1
            );
            assert_eq!(refused, expected);
        }
    }

    #[cfg(not(feature = "tpu"))]
    #[test]
    fn without_the_feature_the_device_is_none_of_ours() {
        assert_eq!(Tpu.index(TPU), None);
        assert_eq!(Tpu.devices(), Err(TpuUnavailable::NotCompiled.into()));
        let text = Tpu.memory(0).unwrap_err().to_string();
        assert_eq!(text, "this program was built without the feature tpu");
    }
}
