//! Memory that libtorch's allocator holds on a GPU.

use tch::Device;

use super::gpu;
use crate::bridge::ffi;
use crate::error::Error;

/// Memory of a GPU that tensors of this process use, in bytes. Libraries (cuDNN, NCCL) and CUDA itself use more, which
/// is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of tensors now (`torch.cuda.memory_allocated`).
    pub allocated: u64,
    /// Maximum of the bytes of tensors so far (`torch.cuda.max_memory_allocated`).
    pub peak: u64,
    /// Bytes taken from the GPU, for tensors or kept for reuse (`torch.cuda.memory_reserved`).
    pub reserved: u64,
}

impl DeviceMemory {
    /// Returns the memory as libtorch's allocator counts it. `None` for the CPU, for which libtorch does not count.
    ///
    /// ```
    /// use brigade_torch::DeviceMemory;
    /// use tch::Device;
    /// assert_eq!(DeviceMemory::of(Device::Cpu)?, None);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] for a GPU that does not exist or that was not used yet.
    pub fn of(device: Device) -> Result<Option<Self>, Error> {
        let Some(index) = gpu(device)? else { return Ok(None) };
        let failed = |error: &cxx::Exception| Error::libtorch("device_memory", error);
        let found = ffi::device_memory(index).map_err(|error| failed(&error))?;
        let ffi::DeviceMemory { allocated, peak, reserved } = found;
        Ok(Some(Self { allocated, peak, reserved }))
    }
}
