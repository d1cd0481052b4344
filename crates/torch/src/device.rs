//! Devices other than the CPU: available devices, the current device of a thread, and memory.

mod cuda;
mod memory;
mod staging;
mod tpu;

use tch::Device;

pub use self::cuda::{Cuda, CudaUnavailable, cuda_compiled, cuda_devices};
pub use self::memory::DeviceMemory;
pub use self::staging::{begin_copy, copy_to_device, copy_to_host, is_pinned, pinned_like};
pub use self::tpu::{TPU, Tpu, TpuUnavailable, join_tpu_slice, tpu_compiled};
use crate::backend::Backend;
use crate::bridge::ffi;
use crate::error::{Error, ErrorKind};

/// A kind of device that libtorch computes on, other than the CPU. To add one, write a file with an implementation, and
/// a line in [`DEVICE_KINDS`].
pub trait DeviceKind: Sync {
    /// Returns the name of the devices without their index, such as `cuda` for `cuda:0`.
    fn name(&self) -> &'static str;

    /// Returns the number of devices that this process can use, which is never 0.
    ///
    /// # Errors
    /// Returns the reason why there is none.
    fn devices(&self) -> Result<usize, DeviceUnavailable>;

    /// Returns the device of this index.
    fn device(&self, index: usize) -> Device;

    /// Returns the index of a device of this kind. `None` if the device is of a different kind.
    fn index(&self, device: Device) -> Option<usize>;

    /// Returns the environment variable that limits a process to some devices.
    fn visibility_variable(&self) -> &'static str;

    /// Returns the name of the hardware, such as `NVIDIA H200`.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    fn hardware(&self, index: usize) -> Result<String, Error>;

    /// Returns free and total memory as the driver counts them, with the memory of other processes.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    fn memory(&self, index: usize) -> Result<MemoryInfo, Error>;

    /// Returns the default backend of groups of ranks with such devices.
    fn default_backend(&self) -> Backend;

    /// Returns `true` if the matrix units of the device compute in bfloat16.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    fn has_bf16(&self, index: usize) -> Result<bool, Error>;

    /// Returns `true` if the devices do the work of a thread in streams with events, beside the host, and copy from and
    /// to pinned memory, as CUDA's do.
    fn has_streams(&self) -> bool;

    /// Loads what libtorch needs for the devices. Does nothing if it was loaded before, or is linked.
    ///
    /// # Errors
    /// Returns the reason why the devices cannot be used.
    fn load(&self) -> Result<(), DeviceUnavailable>;

    /// Waits until the device has completed all its queued work.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device, or an operation on it has failed.
    fn synchronize(&self, index: usize) -> Result<(), Error>;
}

/// All device kinds, in the order in which they are chosen by default.
pub static DEVICE_KINDS: [&dyn DeviceKind; 2] = [&Cuda, &Tpu];

/// Reason why no device of a kind can be used. Its text is that of the kind's own reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceUnavailable {
    /// Reason of [`Cuda`].
    #[error(transparent)]
    Cuda(#[from] CudaUnavailable),
    /// Reason of [`Tpu`].
    #[error(transparent)]
    Tpu(#[from] TpuUnavailable),
}

impl From<DeviceUnavailable> for Error {
    fn from(reason: DeviceUnavailable) -> Self {
        Self::new(ErrorKind::InvalidArgument, reason)
    }
}

impl From<TpuUnavailable> for Error {
    fn from(reason: TpuUnavailable) -> Self {
        DeviceUnavailable::from(reason).into()
    }
}

impl DeviceUnavailable {
    /// Returns `true` if the program was built without the kind's feature.
    #[must_use]
    pub fn is_not_compiled(&self) -> bool {
        matches!(
            self,
            Self::Cuda(CudaUnavailable::NotCompiled) | Self::Tpu(TpuUnavailable::NotCompiled)
        )
    }
}

/// Memory of a device in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process uses.
    pub free: u64,
    /// Bytes of the whole device.
    pub total: u64,
}

/// Methods of tch's [`Device`] that Brigade needs.
///
/// ```
/// use brigade_torch::DeviceExt;
/// use tch::Device;
/// assert_eq!((Device::Cuda(1).label(), Device::Cpu.label()), ("cuda:1".to_owned(), "cpu".to_owned()));
/// assert!(Device::Cpu.device_kind().is_none());
/// ```
pub trait DeviceExt: Copy {
    /// Returns the kind and the index of the device. `None` for the CPU, and for devices that Brigade does not support.
    fn device_kind(self) -> Option<(&'static dyn DeviceKind, usize)>;

    /// Returns libtorch's name of the device, such as `cuda:0` or `cpu`.
    fn label(self) -> String;

    /// Returns `true` for a device of a kind with streams ([`DeviceKind::has_streams`]).
    fn has_streams(self) -> bool;

    /// Loads what libtorch needs for the device, as TPUs do; see [`DeviceKind::load`]. Does nothing for the CPU.
    ///
    /// # Errors
    /// [`DeviceUnavailable`] with the reason why it cannot be used.
    fn load(self) -> Result<(), Error>;

    /// Makes the device the current one of this thread, which is used if no device is given. Without that every rank of
    /// a host would also create a context on the first GPU. Does nothing for the CPU.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    fn make_current(self) -> Result<(), Error>;

    /// Sets a new stream for this thread on the device: its operations use it from now on instead of the default
    /// stream, which cannot be recorded in a [`crate::Graph`]. Does nothing for the CPU.
    ///
    /// Tensors that other threads use without waiting for this stream ([`DeviceExt::synchronize`]) may not be
    /// computed yet.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    fn use_own_stream(self) -> Result<(), Error>;

    /// Waits until the device has completed all its queued work. Returns at once for the CPU.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device, or a kernel on it has failed.
    fn synchronize(self) -> Result<(), Error>;
}

impl DeviceExt for Device {
    fn device_kind(self) -> Option<(&'static dyn DeviceKind, usize)> {
        DEVICE_KINDS.iter().find_map(|&kind| Some((kind, kind.index(self)?)))
    }

    fn label(self) -> String {
        match self.device_kind() {
            Some((kind, index)) => format!("{}:{index}", kind.name()),
            None => format!("{self:?}").to_lowercase(),
        }
    }

    fn has_streams(self) -> bool {
        self.device_kind().is_some_and(|(kind, _)| kind.has_streams())
    }

    fn load(self) -> Result<(), Error> {
        Ok(self.device_kind().map_or(Ok(()), |(kind, _)| kind.load())?)
    }

    fn make_current(self) -> Result<(), Error> {
        let Some(index) = gpu(self)? else { return Ok(()) };
        ffi::set_current_gpu(index).map_err(|error| Error::libtorch("make_current", &error))
    }

    fn use_own_stream(self) -> Result<(), Error> {
        let Some(index) = gpu(self)? else { return Ok(()) };
        ffi::use_pool_stream(index).map_err(|error| Error::libtorch("use_own_stream", &error))
    }

    fn synchronize(self) -> Result<(), Error> {
        self.device_kind().map_or(Ok(()), |(kind, index)| kind.synchronize(index))
    }
}

/// Settings of matrix products and convolutions on GPUs, for the whole process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMath {
    /// `true` if products and convolutions of float32 tensors round their operands to 10 bits (TF32), which matrix
    /// units from Ampere on compute several times faster; accumulation stays in 24 bits.
    pub tf32: bool,
    /// `true` if cuDNN tries all kernels at the first convolution of each shape and keeps the fastest one. The choice
    /// can differ between runs.
    pub benchmark: bool,
    /// `true` if only kernels are used that give the same bits in every run. An operation without one is an error.
    /// cuBLAS needs `CUBLAS_WORKSPACE_CONFIG=:4096:8` for it, which is set unless the environment has a value.
    pub deterministic: bool,
}

impl GpuMath {
    /// Returns the current settings.
    ///
    /// ```
    /// use brigade_torch::GpuMath;
    /// let math = GpuMath { tf32: false, benchmark: true, deterministic: false };
    /// math.apply();
    /// assert_eq!(GpuMath::current()?, math);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch's two interfaces for TF32 were set to different values.
    pub fn current() -> Result<Self, Error> {
        let math = ffi::gpu_math().map_err(|error| Error::libtorch("settings of GPUs", &error))?;
        let ffi::GpuMath { tf32, benchmark, deterministic } = math;
        Ok(Self { tf32, benchmark, deterministic })
    }

    /// Applies the settings. Call it before the first operation on a GPU: cuBLAS reads its variable once.
    ///
    /// ```
    /// use brigade_torch::GpuMath;
    /// GpuMath { tf32: true, benchmark: false, deterministic: false }.apply();
    /// ```
    pub fn apply(self) {
        let Self { tf32, benchmark, deterministic } = self;
        ffi::set_gpu_math(ffi::GpuMath { tf32, benchmark, deterministic });
    }
}

/// Sets whether an operation that waits for a GPU is an error, in the whole process, as
/// `torch.cuda.set_sync_debug_mode("error")` does: for tests. Does nothing without the feature `cuda`.
#[doc(hidden)]
pub fn forbid_waiting(on: bool) {
    #[cfg(feature = "cuda")]
    ffi::forbid_waiting(on);
    #[cfg(not(feature = "cuda"))]
    let _ = on;
}

/// Returns the number of a GPU in libtorch's type, or `None` for devices without streams.
pub(crate) fn gpu(device: Device) -> Result<Option<i32>, Error> {
    let found = device.device_kind().filter(|(kind, _)| kind.has_streams());
    let Some((kind, index)) = found else { return Ok(None) };
    // A device's number is an int8 in libtorch.
    i8::try_from(index).map(|index| Some(i32::from(index))).map_err(|_| {
        let name = kind.name();
        Error::invalid_argument(format!(
            "{name}:{index} is not a device of libtorch: at most 128 are"
        ))
    })
}
