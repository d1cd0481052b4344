//! GPU streams of reading threads: batches are computed on a GPU concurrently with the training thread.
//!
//! Threads of loaders may compute on a GPU. Each has a stream of its own from the pool of high priority, from which no
//! training thread takes one, because a stream that is captured into a graph must not get work of other threads. A
//! thread's stream starts after the work that the starting thread has queued on the device, such as the copy of the
//! dataset, and each batch comes with an event (`StreamEvent`). The stream of the receiving thread waits for that
//! event, and the allocator is notified that the stream uses the memory. So neither thread waits, and batches are ahead
//! in the queue of the device as they are on the host.
//!
//! The memory that a thread reads was allocated on another stream. A thread that ends waits for its stream before it
//! drops its closure. Streams are kept for the next thread: libtorch's allocator reserves a stream's memory for that
//! stream alone, and epochs with new streams would leave memory behind for all 32 of the pool.
//!
//! A loader without a known device has no such stream, and a batch that its threads make on a GPU is an error. Waiting
//! for each batch in the reading thread would need no events, but libtorch's events spin while they wait, which costs a
//! core for each thread.

use brigade_torch::{DeviceExt, Error, ErrorKind, Result, SideStream, StreamEvent, TensorTree};
use tch::Device;

use crate::DataError;

/// Everything that a thread needs to compute on a GPU, made by the thread that starts it.
pub(crate) struct Beside {
    device: Option<Device>,
    /// Event after the work that the starting thread had queued on the device, such as the copy of the dataset.
    begun: Option<StreamEvent>,
}

/// The GPU stream of a thread, if it has one.
///
/// No thread waits for a batch: the stream of the receiving thread waits. The thread itself waits once, when this is
/// dropped. Everything that its closure and its dataset hold lives until then, so that the memory of a tensor that was
/// allocated on another stream and read on this one is not reused too early.
pub(crate) struct OnStream {
    device: Option<Device>,
    entered: Result<Option<SideStream>, String>,
}

impl Beside {
    pub(crate) fn new(device: Option<Device>) -> Result<Self> {
        let device = device.filter(|device| device.has_streams());
        let begun = device.map(StreamEvent::record).transpose()?.flatten();
        Ok(Self { device, begun })
    }

    /// Sets the stream of the calling thread. An error is returned for each of its batches.
    pub(crate) fn enter(self) -> OnStream {
        let entered = match self.device {
            Some(device) => SideStream::enter(device, self.begun.as_ref()),
            None => Ok(None),
        };
        OnStream { device: self.device, entered: entered.map_err(|error| error.to_string()) }
    }
}

impl OnStream {
    /// Runs `work`, and records an event after which its result is complete.
    pub(crate) fn run<T>(
        &mut self,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Option<StreamEvent>)> {
        match (&self.entered, self.device) {
            (Err(message), _) => Err(Error::new(ErrorKind::Data, message.clone())),
            (Ok(Some(_)), Some(device)) => Ok((work()?, StreamEvent::record(device)?)),
            (Ok(_), _) => Ok((work()?, None)),
        }
    }
}

/// Makes this thread's stream wait for the event of a batch.
///
/// # Errors
/// [`DataError::Options`] for a batch on a GPU from a thread without a stream on that GPU: it was computed on the
/// default stream, for which nothing waits.
pub(crate) fn take_over<T: TensorTree + ?Sized>(
    batch: &T,
    computed: Option<&StreamEvent>,
) -> Result<()> {
    if let Some(computed) = computed {
        return computed.take_over(batch);
    }
    let mut on_gpu = None;
    batch.visit(&mut |tensor| {
        let device = tensor.device();
        if device.has_streams() {
            on_gpu.get_or_insert(device);
        }
    });
    match on_gpu {
        None => Ok(()),
        Some(device) => Err(DataError::Options {
            message: format!(
                "a reading thread has made a batch on {0}, but the loader has no such device: set it \
                 (`DataLoader::device`), or prepare the loader with an Accelerator of {0}",
                device.label()
            ),
        }.into()),
    }
}
