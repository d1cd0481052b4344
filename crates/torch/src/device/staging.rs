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

/// The current streams of a thread, for another one that goes on with its tensors: what both give a GPU is done in
/// order then.
///
/// ```
/// use brigade_torch::{Device, Streams};
/// let streams = Streams::current(&[Device::Cpu])?;
/// std::thread::spawn(move || streams.enter()).join().unwrap()?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Streams {
    gpus: Vec<i32>,
    streams: Vec<i64>,
}

impl Streams {
    /// Returns this thread's streams on some devices; the CPU has none.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when there is no such device.
    pub fn current(devices: &[Device]) -> Result<Self, Error> {
        let gpus = devices.iter().filter_map(|&device| gpu(device).transpose());
        let gpus: Vec<i32> = gpus.collect::<Result<_, _>>()?;
        let streams = ffi::current_streams(&gpus);
        let streams = streams.map_err(|error| Error::libtorch("current streams", &error))?;
        Ok(Self { gpus, streams })
    }

    /// Makes them this thread's.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when there is no such device.
    pub fn enter(&self) -> Result<(), Error> {
        ffi::use_streams(&self.gpus, &self.streams)
            .map_err(|error| Error::libtorch("use streams", &error))
    }
}

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

    /// Begins to copy tensors of the CPU through pinned memory, and returns as soon as they lie there: they
    /// may be changed then. The computation on the device goes on meanwhile.
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
