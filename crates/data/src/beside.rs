//! What a reading thread computes on a GPU, beside the thread that trains.

use brigade_torch::{Device, DeviceExt, StreamEvent, Streams};

use crate::DataError;

/// What a thread needs to compute on a GPU, made by the thread that starts it.
pub(crate) struct Beside {
    device: Option<Device>,
    /// What the starting thread has given the device until then, such as the data set's copy.
    begun: Option<StreamEvent>,
}

/// A thread's stream on a GPU, or nothing of the kind.
///
/// No thread waits for a batch: the one that takes it has its own stream wait. The thread itself waits once, at its
/// end. Whatever its closure and its data set hold lives until then, so that the memory of a tensor that it has read
/// on its stream, and that another stream has allocated, is not used again too early.
pub(crate) struct OnStream {
    device: Option<Device>,
    entered: Result<Option<Streams>, String>,
}

impl Beside {
    pub(crate) fn new(device: Option<Device>) -> Result<Self, DataError> {
        let device = device.filter(|device| device.device_kind().is_some());
        let begun = device.map(StreamEvent::record).transpose()?.flatten();
        Ok(Self { device, begun })
    }

    /// Gives the calling thread its stream. What fails is the error of each of its batches.
    pub(crate) fn enter(self) -> OnStream {
        let entered = self.entered().map_err(|error| error.to_string());
        OnStream { device: self.device, entered }
    }

    fn entered(&self) -> Result<Option<Streams>, brigade_torch::Error> {
        let Some(device) = self.device else { return Ok(None) };
        device.make_current()?;
        let streams = Streams::beside(&[device])?;
        streams.enter()?;
        if let Some(begun) = &self.begun {
            begun.follow()?;
        }
        Ok(Some(streams))
    }
}

impl OnStream {
    /// Computes, and marks the point in the stream's work behind which the result is there.
    pub(crate) fn run<T>(
        &mut self,
        work: impl FnOnce() -> Result<T, DataError>,
    ) -> Result<(T, Option<StreamEvent>), DataError> {
        match (&self.entered, self.device) {
            (Err(message), _) => Err(DataError::other(message.clone())),
            (Ok(Some(_)), Some(device)) => Ok((work()?, StreamEvent::record(device)?)),
            (Ok(_), _) => Ok((work()?, None)),
        }
    }
}

impl Drop for OnStream {
    fn drop(&mut self) {
        if let Ok(Some(streams)) = &self.entered {
            // A kernel that has failed is an error of what comes next on the device.
            let _ = streams.wait();
        }
    }
}
