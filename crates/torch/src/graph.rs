//! Graphs: operations on a GPU that are recorded once and replayed in one call.
//!
//! After a recording that failed, libtorch leaves its allocators, and before 2.13 also its generator, in recording
//! mode; `cpp/graph.cpp` resets them. It also keeps cuBLAS's workspaces, which libtorch 2.13 frees with a graph while
//! other graphs of the stream write to them, and empties the allocator's cache before the first recording, which cannot
//! use memory of the cache.

use std::fmt;
use std::sync::OnceLock;

use cxx::UniquePtr;
use tch::Device;

use crate::bridge::ffi;
use crate::device::DeviceExt;
use crate::error::{Error, Fault, TorchError};

/// A recording of operations on a GPU (a CUDA graph). A replay launches all of them with one call of the driver, which
/// removes the launch overhead of many small kernels.
///
/// Operations are replayed on the memory that they were recorded with: inputs are changed by copying into the tensors
/// that were used, and outputs are read before the next replay. Random operations draw new numbers in each replay.
/// Actions of the host during the recording (branches, counters, numbers that were passed by value) are not repeated.
pub struct Graph {
    recorded: Recorded,
    copies: Copies,
    device: Device,
}

/// A recorder of graphs for devices other than CUDA's: for tests without a GPU.
#[doc(hidden)]
pub trait GraphRecorder: Send + Sync {
    /// Starts to record this thread's operations on the device.
    ///
    /// # Errors
    /// Returns the reason why that is impossible.
    fn begin(&self, device: usize) -> Result<(), String>;

    /// Ends the recording and returns it.
    ///
    /// # Errors
    /// Returns the reason why the recording is invalid.
    fn end(&self) -> Result<Box<dyn RecordedGraph>, String>;
}

/// A recording of a [`GraphRecorder`].
#[doc(hidden)]
pub trait RecordedGraph: Send {
    /// Runs the recorded operations again.
    ///
    /// # Errors
    /// Returns the reason why that is impossible.
    fn replay(&mut self) -> Result<(), String>;
}

static RECORDER: OnceLock<Box<dyn GraphRecorder>> = OnceLock::new();

/// Sets the recorder of graphs for the whole process, unless one was set before.
#[doc(hidden)]
pub fn record_graphs_with(recorder: Box<dyn GraphRecorder>) {
    let _ = RECORDER.set(recorder);
}

enum Recorded {
    #[cfg(feature = "cuda")]
    Cuda(cuda::Graph),
    Provided(Box<dyn RecordedGraph>),
}

impl Graph {
    /// Records the device operations of `body`, without running them. No operation in it may wait for the device, or
    /// allocate unpinned memory of the host.
    ///
    /// `shared` is a graph whose intermediate memory this one may use too; they must not be replayed at the same time,
    /// and a replay of one overwrites the intermediate values of the other.
    ///
    /// # Errors
    /// Returns the errors of `body`; [`crate::TorchError::Libtorch`] when the device does not record graphs
    /// ([`Fault::Unsupported`]), or when an operation cannot be recorded.
    pub fn record<R, E: From<Error>>(
        device: Device,
        shared: Option<&Self>,
        body: impl FnOnce() -> Result<R, E>,
    ) -> Result<(Self, R), E> {
        let recording = GraphRecording::begin(device, shared)?;
        let result = body();
        // Also after a failure: the stream has to leave the recording.
        let graph = recording.end();
        Ok((graph?, result?))
    }

    /// Queues the recorded operations again, on the current stream. Returns before they are done.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device has failed.
    pub fn replay(&mut self) -> Result<(), Error> {
        let copies = self.copies.0.before_replay();
        copies.map_err(|error| Error::libtorch("cast weights for a graph", &error))?;
        match &mut self.recorded {
            #[cfg(feature = "cuda")]
            Recorded::Cuda(graph) => graph.replay(),
            Recorded::Provided(graph) => graph.replay().map_err(failed),
        }
    }

    /// Returns the device of the recording.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Returns `true` if graphs can be recorded on the device.
///
/// ```
/// assert!(!brigade_torch::records_graphs(tch::Device::Cpu));
/// ```
#[must_use]
pub fn records_graphs(device: Device) -> bool {
    device.has_streams() && (cfg!(feature = "cuda") || RECORDER.get().is_some())
}

fn failed(detail: String) -> Error {
    TorchError::Libtorch { operation: "record a graph", fault: Fault::Invalid, detail }.into()
}

/// A recording in progress of this thread, for code whose start and end are in two functions; [`Graph::record`] records
/// one. If it is dropped without [`GraphRecording::end`], for example by a panic, the recording is discarded. It must
/// end in the thread that began it.
#[must_use = "a recording ends when it is dropped"]
pub struct GraphRecording {
    begun: Option<(Begun, Copies)>,
    device: Device,
}

/// The 16-bit copies of weights that a graph reads and writes.
struct Copies(UniquePtr<ffi::GraphCopies>);

// SAFETY: tensors, whose counts of references are atomic, and what is read and written under a lock.
unsafe impl Send for Copies {}

impl Copies {
    fn of_graph(gpu: usize) -> Result<Self, Error> {
        let copies = ffi::copies_of_graph(i32::try_from(gpu).unwrap_or(-1));
        copies.map(Self).map_err(|error| Error::libtorch("record a graph", &error))
    }
}

enum Begun {
    #[cfg(feature = "cuda")]
    Cuda(cuda::Graph),
    Provided(&'static dyn GraphRecorder),
}

impl GraphRecording {
    /// Starts to record the device operations of this thread. [`Graph::record`] describes `shared`.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the device does not record graphs ([`Fault::Unsupported`]), or records
    /// one already.
    pub fn begin(device: Device, shared: Option<&Graph>) -> Result<Self, Error> {
        let unsupported = || TorchError::Libtorch {
            operation: "record a graph",
            fault: Fault::Unsupported,
            detail: format!("{} does not record graphs", device.label()),
        };
        let (_, index) = device.device_kind().ok_or_else(unsupported)?;
        if let Some(recorder) = RECORDER.get() {
            let copies = Copies::of_graph(index)?;
            recorder.begin(index).map_err(failed)?;
            let begun = Some((Begun::Provided(recorder.as_ref()), copies));
            return Ok(Self { begun, device });
        }
        #[cfg(feature = "cuda")]
        {
            let shared = shared.and_then(|graph| match &graph.recorded {
                Recorded::Cuda(graph) => Some(graph),
                Recorded::Provided(_) => None,
            });
            let copies = Copies::of_graph(index)?;
            let begun = cuda::Graph::begin(device, shared)?;
            Ok(Self { begun: Some((Begun::Cuda(begun), copies)), device })
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (shared, index);
            Err(unsupported().into())
        }
    }

    /// Ends the recording and returns the graph.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when an operation could not be recorded.
    pub fn end(mut self) -> Result<Graph, Error> {
        let Some((begun, mut copies)) = self.begun.take() else {
            return Err(failed("it has ended already".to_owned()));
        };
        copies.0.pin_mut().end();
        let recorded = match begun {
            #[cfg(feature = "cuda")]
            Begun::Cuda(graph) => Recorded::Cuda(graph.end()?),
            Begun::Provided(recorder) => Recorded::Provided(recorder.end().map_err(failed)?),
        };
        Ok(Graph { recorded, copies, device: self.device })
    }
}

impl fmt::Debug for GraphRecording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphRecording").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Drop for GraphRecording {
    fn drop(&mut self) {
        match self.begun.take() {
            #[cfg(feature = "cuda")]
            Some((Begun::Cuda(graph), _)) => drop(graph.end()),
            Some((Begun::Provided(recorder), _)) => drop(recorder.end()),
            None => {}
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use cxx::UniquePtr;
    use tch::Device;

    use crate::bridge::ffi;
    use crate::device::gpu;
    use crate::error::Error;

    pub(super) struct Graph(UniquePtr<ffi::Graph>);

    // SAFETY: a graph is bound to a device, not to a thread, and a replay needs it exclusively.
    unsafe impl Send for Graph {}

    impl Graph {
        pub(super) fn begin(device: Device, shared: Option<&Self>) -> Result<Self, Error> {
            let index = gpu(device)?.unwrap_or_default();
            let shared = shared.map_or(std::ptr::null(), |graph| std::ptr::from_ref(&*graph.0));
            // SAFETY: null, or a graph that is borrowed for the call.
            let graph = unsafe { ffi::graph_begin(index, shared) };
            graph.map(Self).map_err(|error| Error::libtorch("record a graph", &error))
        }

        pub(super) fn end(mut self) -> Result<Self, Error> {
            ffi::graph_end(self.0.pin_mut())
                .map_err(|error| Error::libtorch("record a graph", &error))?;
            Ok(self)
        }

        pub(super) fn replay(&mut self) -> Result<(), Error> {
            ffi::graph_replay(self.0.pin_mut())
                .map_err(|error| Error::libtorch("replay a graph", &error))
        }
    }
}
