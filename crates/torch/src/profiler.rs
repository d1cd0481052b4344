//! libtorch's profiler: events with their times.

mod kineto_thread;

use std::fmt;
use std::marker::PhantomData;

use cxx::UniquePtr;

use crate::bridge::ffi;
use crate::error::Error;

/// Options of a recording: the information besides names and times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProfilerOptions {
    /// `true` if kernels and copies of the GPU are recorded. Defaults to `false`.
    pub cuda: bool,
    /// `true` if the shapes of the operations' inputs are recorded. Defaults to `false`.
    pub shapes: bool,
    /// `true` if allocations and deallocations of memory are recorded. Defaults to `false`.
    pub memory: bool,
    /// `true` if the number of floating-point operations is computed from shapes, for operations for which libtorch has
    /// a formula. Defaults to `false`.
    pub flops: bool,
}

/// An event of a recording: an operation, a scope, a kernel or an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfiledEvent {
    /// Name of the operation (`aten::conv2d`), of the scope or of the kernel. `[memory]` for allocations.
    pub name: String,
    /// Start time in nanoseconds, from an origin that is the same for all events of a recording.
    pub start_ns: u64,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
    /// Number of the thread, or of the GPU's stream.
    pub lane: u64,
    /// `true` if it ran on a GPU.
    pub on_device: bool,
    /// Number of bytes that were allocated. Negative if they were freed.
    pub bytes: i64,
    /// Number of floating-point operations. 0 if it is not known.
    pub flops: u64,
    /// Shapes of the inputs, such as `[[64, 1, 28, 28], []]`. Empty unless they were recorded.
    pub shapes: String,
}

/// A recording in progress. A thread has one at a time; dropping it discards the recorded events.
///
/// ```
/// use brigade_torch::{ProfilerOptions, Recording};
/// use tch::{Kind, Tensor};
/// let recording = Recording::start(ProfilerOptions::default())?;
/// let _ = Tensor::ones([8, 8], (Kind::Float, tch::Device::Cpu)).matmul(&Tensor::from(1f32).expand([8, 8], true));
/// # let folder = tempfile::tempdir().unwrap();
/// # let trace = folder.path().join("trace.json");
/// # let trace = trace.to_str().unwrap();
/// let events = recording.finish(Some(trace))?;
/// assert!(events.iter().any(|event| event.name == "aten::matmul"));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use = "dropping it discards what was recorded"]
pub struct Recording {
    running: bool,
    /// Makes it `!Send`: libtorch keeps the state with the thread.
    _thread: PhantomData<*const ()>,
}

impl Recording {
    /// Starts to record the operations of this thread, and of the threads of its `backward`.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if this thread is already being recorded.
    pub fn start(options: ProfilerOptions) -> Result<Self, Error> {
        let ProfilerOptions { cuda, shapes, memory, flops } = options;
        kineto_thread::around_first_start(|| {
            ffi::profiler_start(&ffi::ProfilerOptions { cuda, shapes, memory, flops })
                .map_err(|error| Error::libtorch("profiler_start", &error))
        })?;
        Ok(Self { running: true, _thread: PhantomData })
    }

    /// Ends the recording. With a path it is also written as a file for Chrome's and Perfetto's viewers.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn finish(mut self, path: Option<&str>) -> Result<Vec<ProfiledEvent>, Error> {
        self.running = false;
        let events = ffi::profiler_stop(path.unwrap_or_default())
            .map_err(|error| Error::libtorch("profiler_stop", &error))?;
        Ok(events
            .into_iter()
            .map(|event| ProfiledEvent {
                name: event.name,
                start_ns: event.start_ns,
                duration_ns: event.duration_ns,
                lane: event.lane,
                on_device: event.on_device,
                bytes: event.bytes,
                flops: event.flops,
                shapes: event.shapes,
            })
            .collect())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.running {
            // Discarded: there is no caller to return it to.
            let _ = ffi::profiler_stop("");
        }
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recording")
    }
}

/// A named part of a recording, which lasts until it is dropped. It costs almost nothing if nothing is recorded.
///
/// ```
/// # let optimizer = || ();
/// let _scope = brigade_torch::Scope::enter("optimizer step")?;
/// optimizer();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use = "the scope ends where this is dropped"]
pub struct Scope(
    #[expect(dead_code, reason = "its destructor ends the scope")] UniquePtr<ffi::Scope>,
);

impl Scope {
    /// Begins a part of the recording with this name.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn enter(name: &str) -> Result<Self, Error> {
        ffi::enter_scope(name).map(Self).map_err(|error| Error::libtorch("enter_scope", &error))
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scope")
    }
}
