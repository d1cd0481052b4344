//! Asynchronous copies between the host and a GPU.

use tch::{Device, Tensor};

use super::gpu;
use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// Starts to copy a tensor of a GPU into pinned memory of the host: into that of `into`, the result of an earlier copy
/// of another tensor of its shape and kind, or into new memory. It may be read after [`crate::DeviceExt::synchronize`].
/// A tensor of the CPU is copied at once, into ordinary memory.
///
/// ```
/// use brigade_torch::copy_to_host;
/// use tch::Tensor;
/// let copy = copy_to_host(&Tensor::from_slice(&[1i64, 2]), None)?;
/// assert_eq!(copy, Tensor::from_slice(&[1i64, 2]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if the copy fails, for example because memory is full.
pub fn copy_to_host(from: &Tensor, into: Option<&Tensor>) -> Result<Tensor, Error> {
    ffi::copy_to_host(borrow(from), &borrow_optional(into))
        .map(own)
        .map_err(|error| Error::libtorch("copy to the host", &error))
}

/// Starts to copy a tensor to a device through pinned memory, on this thread's stream, without waiting for it: later
/// kernels of this thread on the device run after the copy. The tensor may be changed at once. For the CPU, and if it
/// is on the device already, the tensor itself is returned.
///
/// ```
/// use brigade_torch::copy_to_device;
/// use tch::{Device, Tensor};
/// let indices = copy_to_device(&Tensor::from_slice(&[3i64, 1]), Device::Cpu)?;
/// assert_eq!(indices, Tensor::from_slice(&[3i64, 1]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if the copy fails, for example because memory is full; [`crate::TorchError::Tensor`]
/// if the copy of a GPU's tensor to the CPU fails.
pub fn copy_to_device(from: &Tensor, device: Device) -> Result<Tensor, Error> {
    let Some(index) = gpu(device)? else { return Ok(from.f_to_device(device)?) };
    ffi::copy_to_gpu(borrow(from), index)
        .map(own)
        .map_err(|error| Error::libtorch("copy to a device", &error))
}

/// Starts to copy a tensor into another of its shape and kind, on this thread's stream if one of them is on a GPU, and
/// does not wait for it. The host's tensor is in pinned memory ([`pinned_like`]); until the copy is complete it must not
/// be changed, and must not be read if it is the destination. It is complete for later operations on the same stream,
/// and for the host after [`crate::DeviceExt::synchronize`].
///
/// ```
/// use brigade_torch::begin_copy;
/// use tch::Tensor;
/// let (from, into) = (Tensor::from_slice(&[3i64, 1]), Tensor::from_slice(&[0i64, 0]));
/// begin_copy(&from, &into)?;
/// assert_eq!(into, from);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for shapes that cannot be broadcast.
pub fn begin_copy(from: &Tensor, into: &Tensor) -> Result<(), Error> {
    ffi::copy_to_host(borrow(from), &borrow_optional(Some(into)))
        .map(drop)
        .map_err(|error| Error::libtorch("copy", &error))
}

/// Returns a tensor in pinned memory of the host, with the shape, strides and kind of another one. Its values are not
/// set. Copies between it and a GPU run concurrently with the host.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if there is no GPU, or if memory is full.
pub fn pinned_like(like: &Tensor) -> Result<Tensor, Error> {
    ffi::pinned_like(borrow(like))
        .map(own)
        .map_err(|error| Error::libtorch("pinned memory", &error))
}

/// Returns `true` if a tensor is in pinned memory of the host.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for a tensor without memory.
pub fn is_pinned(tensor: &Tensor) -> Result<bool, Error> {
    ffi::is_pinned(borrow(tensor)).map_err(|error| Error::libtorch("is_pinned", &error))
}
