//! The streams of a thread, and points in their work that other streams come behind.

use std::fmt;

use cxx::UniquePtr;
use tch::{Device, Tensor};

use super::gpu;
use crate::bridge::{borrow_all, ffi};
use crate::error::Error;
use crate::tensor_tree::TensorTree;

/// The current streams of a thread, for another one that goes on with its tensors: what both give a GPU is done in
/// order then. Or, with [`Streams::beside`], streams for a thread that computes beside others.
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
        Self::of(devices, |gpus| {
            let streams = ffi::current_streams(gpus);
            streams.map_err(|error| Error::libtorch("current streams", &error))
        })
    }

    /// Takes streams of the devices' pools, beside those on which threads compute otherwise. [`StreamEvent`] puts
    /// their work and that of other streams in order.
    ///
    /// ```
    /// use brigade_torch::{Device, Streams};
    /// Streams::beside(&[Device::Cpu])?.enter()?; // The CPU has none.
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Libtorch`] when there is no such device.
    pub fn beside(devices: &[Device]) -> Result<Self, Error> {
        Self::of(devices, |gpus| {
            ffi::side_streams(gpus).map_err(|error| Error::libtorch("side streams", &error))
        })
    }

    fn of(
        devices: &[Device],
        streams: impl FnOnce(&[i32]) -> Result<Vec<i64>, Error>,
    ) -> Result<Self, Error> {
        let gpus = devices.iter().filter_map(|&device| gpu(device).transpose());
        let gpus: Vec<i32> = gpus.collect::<Result<_, _>>()?;
        let streams = streams(&gpus)?;
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

    /// Waits until the devices have done what the streams were given.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when a kernel has failed.
    pub fn wait(&self) -> Result<(), Error> {
        ffi::finish_streams(&self.gpus, &self.streams)
            .map_err(|error| Error::libtorch("wait for streams", &error))
    }
}

/// A point in the work of a thread's stream on a GPU: what another thread's stream is given behind it comes after what
/// this one was given before. The host waits for neither.
///
/// ```
/// use brigade_torch::{Device, StreamEvent};
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
    /// [`Error::Libtorch`] when there is no such device.
    pub fn record(device: Device) -> Result<Option<Self>, Error> {
        let Some(index) = gpu(device)? else { return Ok(None) };
        let event = ffi::record_event(index);
        event.map(|event| Some(Self { event })).map_err(|error| Error::libtorch("event", &error))
    }

    /// Has what this thread gives the device from now on come behind the event.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when the device has failed.
    pub fn follow(&self) -> Result<(), Error> {
        ffi::follow_event(&self.event, &[]).map_err(|error| Error::libtorch("event", &error))
    }

    /// Takes over tensors that the other thread has computed before the event: this thread may use them, and when
    /// they are dropped, their memory is used again only when the device has done what this thread gave it.
    ///
    /// # Errors
    /// [`Error::Libtorch`] when the device has failed.
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
