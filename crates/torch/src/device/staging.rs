//! Copies to a GPU beside the computation.

use std::fmt;

use cxx::{CxxVector, UniquePtr};
use tch::{Device, Tensor};

use super::gpu;
use crate::bridge::{borrow, borrow_all, borrow_optional, ffi, own};
use crate::error::Error;
use crate::tensor_tree::{TensorTree, TreeSpec};

/// A stream of a GPU for copies, beside the one that computes.
pub struct CopyStream {
    stream: UniquePtr<ffi::CopyStream>,
    device: Device,
}

// SAFETY: a stream is a number of libtorch's pool, which any thread may use.
unsafe impl Send for CopyStream {}

/// Tensors whose copy to a GPU has begun.
///
/// Their memory is the copying stream's: dropped before [`Staged::finish`], it is used again only behind the
/// copy.
pub struct Staged<T> {
    copy: UniquePtr<ffi::StagedCopy>,
    spec: TreeSpec,
    tree: std::marker::PhantomData<fn() -> T>,
}

// SAFETY: tensors (atomic counts) that nothing else refers to before `finish`, and an event, which any thread
// may wait for.
unsafe impl<T> Send for Staged<T> {}

impl CopyStream {
    /// Takes a stream of the device's pool; `None` for the CPU.
    ///
    /// ```
    /// use brigade_torch::{CopyStream, Device};
    /// assert!(CopyStream::of(Device::Cpu)?.is_none());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Libtorch`] when there is no such device.
    pub fn of(device: Device) -> Result<Option<Self>, Error> {
        let Some(index) = gpu(device)? else { return Ok(None) };
        let stream = ffi::new_copy_stream(index);
        let stream = stream.map_err(|error| Error::libtorch("copy stream", &error))?;
        Ok(Some(Self { stream, device }))
    }

    /// Returns the device that is copied to.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Makes it this thread's stream on its device: what the thread computes from now on goes there.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when the device has failed.
    pub fn enter(&self) -> Result<(), Error> {
        ffi::enter_copy_stream(&self.stream)
            .map_err(|error| Error::libtorch("enter a copy stream", &error))
    }

    /// Waits until the device has done what the stream was given.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when a kernel has failed.
    pub fn wait(&self) -> Result<(), Error> {
        ffi::finish_copy_stream(&self.stream)
            .map_err(|error| Error::libtorch("wait for a copy stream", &error))
    }

    /// Begins to copy tensors of the CPU through pinned memory, and returns as soon as they lie there: they
    /// may be changed then. The computation on the device goes on meanwhile. Tensors that are on the device
    /// already are handed on as they are, behind what this thread has given the device for them, and those of
    /// another GPU are copied from there.
    ///
    /// # Errors
    /// [`Error::Libtorch`], as when the device's memory is full.
    pub fn start<T: TensorTree>(&self, tree: &T) -> Result<Staged<T::Owned>, Error> {
        let mut tensors = Vec::new();
        tree.visit(&mut |tensor| tensors.push(tensor));
        let copy = ffi::stage(&self.stream, &borrow_all(&tensors));
        let copy = copy.map_err(|error| Error::libtorch("copy to a device", &error))?;
        Ok(Staged { copy, spec: tree.spec(), tree: std::marker::PhantomData })
    }
}

/// Begins to copy a tensor of a GPU into pinned memory of the host: into that of `into`, which an earlier copy of
/// another tensor of its shape and kind has, or into new memory. It may be read after [`crate::DeviceExt::synchronize`].
/// A tensor of the CPU is copied at once, into ordinary memory.
///
/// ```
/// use brigade_torch::{Tensor, copy_to_host};
/// let copy = copy_to_host(&Tensor::from_slice(&[1i64, 2]), None)?;
/// assert_eq!(copy, Tensor::from_slice(&[1i64, 2]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`Error::Libtorch`], as when memory is full.
pub fn copy_to_host(from: &Tensor, into: Option<&Tensor>) -> Result<Tensor, Error> {
    ffi::copy_to_host(borrow(from), &borrow_optional(into))
        .map(own)
        .map_err(|error| Error::libtorch("copy to the host", &error))
}

/// Begins to copy a tensor to a device through pinned memory, on this thread's stream there, and does not wait for it:
/// kernels that this thread gives the device come behind the copy. The tensor may be changed at once. On the CPU, and
/// where it is on the device already, it is the tensor itself.
///
/// ```
/// use brigade_torch::{Device, Tensor, copy_to_device};
/// let indices = copy_to_device(&Tensor::from_slice(&[3i64, 1]), Device::Cpu)?;
/// assert_eq!(indices, Tensor::from_slice(&[3i64, 1]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`Error::Libtorch`], as when memory is full; [`Error::Tensor`] for a copy of a GPU's tensor to the CPU that fails.
pub fn copy_to_device(from: &Tensor, device: Device) -> Result<Tensor, Error> {
    let Some(index) = gpu(device)? else { return Ok(from.f_to_device(device)?) };
    ffi::copy_to_gpu(borrow(from), index)
        .map(own)
        .map_err(|error| Error::libtorch("copy to a device", &error))
}

/// Returns whether a tensor lies in pinned memory of the host.
///
/// # Errors
/// [`Error::Libtorch`] for a tensor without memory.
pub fn is_pinned(tensor: &Tensor) -> Result<bool, Error> {
    ffi::is_pinned(borrow(tensor)).map_err(|error| Error::libtorch("is_pinned", &error))
}

impl<T: TensorTree<Owned = T>> Staged<T> {
    /// Returns the tensors on the device. What the current stream is given from now on waits for the copy; the
    /// host does not.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when the device has failed.
    pub fn finish(self) -> Result<T, Error> {
        let tensors = ffi::staged_tensors(&self.copy);
        let tensors = tensors.map_err(|error| Error::libtorch("copy to a device", &error))?;
        T::from_spec(&self.spec, &mut owned(&tensors).into_iter())
    }
}

fn owned(tensors: &CxxVector<ffi::Tensor>) -> Vec<Tensor> {
    tensors.iter().map(|tensor| own(ffi::copy_handle(tensor))).collect()
}

impl fmt::Debug for CopyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyStream").field("device", &self.device).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Staged<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged").field("spec", &self.spec).finish_non_exhaustive()
    }
}
