//! GPU streams of a thread, and events in them for which other streams wait.

use std::fmt;
use std::marker::PhantomData;

use cxx::UniquePtr;
use tch::{Device, Tensor};

use crate::bridge::{borrow_all, ffi};
use crate::device::{DeviceExt, gpu};
use crate::error::Error;
use crate::tensor_tree::TensorTree;

/// The current GPU streams of a thread, for another thread that continues with its tensors, so that the work of both is
/// done in order.
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
    /// Returns this thread's current streams on some devices. The CPU has none.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    pub fn current(devices: &[Device]) -> Result<Self, Error> {
        let gpus = devices.iter().filter_map(|&device| gpu(device).transpose());
        let gpus: Vec<i32> = gpus.collect::<Result<_, _>>()?;
        let streams = ffi::current_streams(&gpus);
        let streams = streams.map_err(|error| Error::libtorch("current streams", &error))?;
        Ok(Self { gpus, streams })
    }

    /// Makes these streams the current ones of the calling thread.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    pub fn enter(&self) -> Result<(), Error> {
        ffi::use_streams(&self.gpus, &self.streams)
            .map_err(|error| Error::libtorch("use streams", &error))
    }
}

/// A GPU stream for the work of this thread, which runs concurrently with other threads' streams. A [`StreamEvent`]
/// orders the work of two streams.
///
/// When it is dropped, it waits until the device has done the stream's work. Tensors that its kernels read, and that
/// other streams have allocated, must be dropped later. The next side stream reuses the stream and the memory that
/// libtorch keeps for it.
#[derive(Debug)]
pub struct SideStream {
    gpu: i32,
    stream: i64,
    /// Makes it `!Send`: the stream is left in the thread that entered it.
    of_this_thread: PhantomData<*const ()>,
}

impl SideStream {
    /// Takes a stream that no other thread uses, and makes it and the device the current ones of this thread. The
    /// thread's work on the device waits for the event `behind`. `None` for the CPU.
    ///
    /// ```
    /// use brigade_torch::SideStream;
    /// use tch::Device;
    /// assert!(SideStream::enter(Device::Cpu, None)?.is_none());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
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
        // An error of a kernel is returned by the next operation on the device.
        let _ = ffi::leave_side_stream(self.gpu, self.stream);
    }
}

/// A point in the work of a thread's stream on a GPU, which another thread's stream can wait for. The host does not
/// wait for either.
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
    /// Records an event after this thread's work on the device so far. `None` for the CPU.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if there is no such device.
    pub fn record(device: Device) -> Result<Option<Self>, Error> {
        let Some(index) = gpu(device)? else { return Ok(None) };
        let event = ffi::record_event(index);
        event.map(|event| Some(Self { event })).map_err(|error| Error::libtorch("event", &error))
    }

    /// Returns `true` if the device has done the work before the event. Does not wait.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn is_done(&self) -> Result<bool, Error> {
        ffi::event_is_done(&self.event).map_err(|error| Error::libtorch("event", &error))
    }

    /// Waits until the device has done the work before the event.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn wait(&self) -> Result<(), Error> {
        ffi::wait_for_event(&self.event).map_err(|error| Error::libtorch("event", &error))
    }

    /// Makes this thread's following work on the device wait for the event.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn follow(&self) -> Result<(), Error> {
        ffi::follow_event(&self.event, &[]).map_err(|error| Error::libtorch("event", &error))
    }

    /// Takes over tensors that the other thread has computed before the event: this thread may use them, and when they
    /// are dropped, their memory is reused only after the device has done this thread's work.
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
