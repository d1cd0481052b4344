//! The streams of a thread, and points in their work that other streams come behind.

use std::fmt;
use std::marker::PhantomData;

use cxx::UniquePtr;
use tch::{Device, Tensor};

use crate::bridge::{borrow_all, ffi};
use crate::device::{DeviceExt, gpu};
use crate::error::Error;
use crate::tensor_tree::TensorTree;

/// The current streams of a thread, for another one that goes on with its tensors: what both give a GPU is done in
/// order then.
///
/// ```
/// use brigade_torch::Streams;
/// use tch::Device;
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
    /// [`crate::TorchError::Libtorch`] when there is no such device.
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
    /// [`crate::TorchError::Libtorch`] when there is no such device.
    pub fn enter(&self) -> Result<(), Error> {
        ffi::use_streams(&self.gpus, &self.streams)
            .map_err(|error| Error::libtorch("use streams", &error))
    }
}

/// A stream on a GPU that this thread computes on beside the threads that compute on others. [`StreamEvent`] puts their
/// work in order.
///
/// Dropped, it waits until the device has done what the stream was given: what its kernels read, and other streams have
/// allocated, is to be dropped later. The stream, with the memory that libtorch keeps for it, is that of the next one
/// then.
#[derive(Debug)]
pub struct SideStream {
    gpu: i32,
    stream: i64,
    /// It is left in the thread that has it.
    of_this_thread: PhantomData<*const ()>,
}

impl SideStream {
    /// Takes a stream that no other thread has, and makes it and the device current in this thread; what the thread
    /// gives the device comes behind the event. `None` for the CPU.
    ///
    /// ```
    /// use brigade_torch::SideStream;
    /// use tch::Device;
    /// assert!(SideStream::enter(Device::Cpu, None)?.is_none());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when there is no such device.
    pub fn enter(device: Device, behind: Option<&StreamEvent>) -> Result<Option<Self>, Error> {
        let Some(gpu) = gpu(device)? else { return Ok(None) };
        device.make_current()?;
        let stream = ffi::enter_side_stream(gpu);
        let stream = stream.map_err(|error| Error::libtorch("side stream", &error))?;
        if let Some(event) = behind {
            event.follow()?;
        }
        Ok(Some(Self { gpu, stream, of_this_thread: PhantomData }))
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // A kernel that has failed is an error of what comes next on the device.
        let _ = ffi::leave_side_stream(self.gpu, self.stream);
    }
}

/// A point in the work of a thread's stream on a GPU: what another thread's stream is given behind it comes after what
/// this one was given before. The host waits for neither.
///
/// ```
/// use brigade_torch::StreamEvent;
/// use tch::Device;
/// // The CPU is done with everything at once.
/// assert!(StreamEvent::record(Device::Cpu)?.is_none());
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct StreamEvent {
    event: UniquePtr<ffi::StreamEvent>,
}

// SAFETY: an event of a device, which any thread may wait for.
unsafe impl Send for StreamEvent {}

impl StreamEvent {
    /// Marks what this thread has given the device so far; `None` for the CPU.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when there is no such device.
    pub fn record(device: Device) -> Result<Option<Self>, Error> {
        let Some(index) = gpu(device)? else { return Ok(None) };
        let event = ffi::record_event(index);
        event.map(|event| Some(Self { event })).map_err(|error| Error::libtorch("event", &error))
    }

    /// Returns whether the device has done what it was given before the event. Does not wait.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn is_done(&self) -> Result<bool, Error> {
        ffi::event_is_done(&self.event).map_err(|error| Error::libtorch("event", &error))
    }

    /// Waits until the device has done what it was given before the event.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn wait(&self) -> Result<(), Error> {
        ffi::wait_for_event(&self.event).map_err(|error| Error::libtorch("event", &error))
    }

    /// Has what this thread gives the device from now on come behind the event.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn follow(&self) -> Result<(), Error> {
        ffi::follow_event(&self.event, &[]).map_err(|error| Error::libtorch("event", &error))
    }

    /// Takes over tensors that the other thread has computed before the event: this thread may use them, and when
    /// they are dropped, their memory is used again only when the device has done what this thread gave it.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn take_over<T: TensorTree + ?Sized>(&self, tree: &T) -> Result<(), Error> {
        let mut tensors: Vec<&Tensor> = Vec::new();
        tree.visit(&mut |tensor| tensors.push(tensor));
        ffi::follow_event(&self.event, &borrow_all(&tensors))
            .map_err(|error| Error::libtorch("event", &error))
    }
}

impl fmt::Debug for StreamEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamEvent").finish_non_exhaustive()
    }
}
