//! What libtorch's allocator holds on a GPU.

use tch::Device;

use super::gpu;
use crate::bridge::ffi;
use crate::error::Error;

/// The memory of a GPU that tensors of this process take, in bytes. Libraries (cuDNN, NCCL) and CUDA
/// itself take more, which is not counted here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In tensors now (`torch.cuda.memory_allocated`).
    pub allocated: u64,
    /// The most that there was (`torch.cuda.max_memory_allocated`).
    pub peak: u64,
    /// Taken from the GPU, in tensors or kept for later (`torch.cuda.memory_reserved`).
    pub reserved: u64,
}

impl DeviceMemory {
    /// As libtorch's allocator counts it; `None` for the CPU, where libtorch does not count.
    ///
    /// ```
    /// use brigade_torch::DeviceMemory;
    /// use tch::Device;
    /// assert_eq!(DeviceMemory::of(Device::Cpu)?, None);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] for a GPU that is not there or that nothing was computed on yet.
    pub fn of(device: Device) -> Result<Option<Self>, Error> {
        let Some(index) = gpu(device)? else { return Ok(None) };
        let failed = |error: &cxx::Exception| Error::libtorch("device_memory", error);
        let found = ffi::device_memory(index).map_err(|error| failed(&error))?;
        let ffi::DeviceMemory { allocated, peak, reserved } = found;
        Ok(Some(Self { allocated, peak, reserved }))
    }
}
