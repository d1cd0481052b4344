//! GPUs made of host memory.
//!
//! [`install`] must come before the first backward pass of the process: libtorch then starts one thread per device,
//! and does not look again. nextest runs each test in a process of its own.
//!
//! - Operators run at once, on every stream, after what the stream has put off. Copies between pinned memory and the
//!   device with `non_blocking`, on another stream than the default one, are put off until something waits for them:
//!   an event that was recorded behind them, the stream, or another operator on it. They hold addresses and no
//!   tensors. Until then the destination has NaN (bytes 0xFF), as all memory that was freed or never written.
//! - A tensor that is freed while a stream other than its own still has work put off is reused at once, and the copy
//!   then writes into memory of others, unless [`record_stream`] has named the stream. Pinned memory that was freed
//!   waits for the copies from it, as libtorch's allocator for CUDA has it wait; pinned memory that is overwritten
//!   does not.
//! - A graph that is captured has its memory as before the capture, since a capture runs nothing on a real GPU.
//! - An operator that the CPU has a kernel for runs that kernel, even where libtorch makes it of others on a real GPU.
//!   So results have the bits of the CPU, except for attention, LSTM and GRU layers, which are made of plain
//!   operators (attention of two fused ones while [`account`] runs), and dropout, whose numbers come from the device's generator. Whether a real GPU has an operator for
//!   an element type, these do not show.
//! - Sparse, nested and quantized tensors are errors, and so are the operators that libtorch has for CUDA alone:
//!   `batch_norm_stats`, `batch_norm_elemt`, `batch_norm_gather_stats` and their kin, `_flash_attention_forward`,
//!   `_efficient_attention_forward`, `_scaled_grouped_mm`, `_fused_dropout`, `_conv_depthwise2d` when it is called by
//!   that name, `_weight_int4pack_mm`, and all `cudnn_*` and `miopen_*`.

mod account;
mod graphs;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use tch::Tensor;

pub use self::account::{Account, OperatorTotals, account};
pub use crate::error::FakeError;
use crate::ffi;

/// Memory statistics of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Memory of the current tensors, each rounded up to a multiple of 512.
    pub allocated: u64,
    /// Maximum of `allocated` so far.
    pub peak: u64,
    /// Memory taken from the host, including that which is kept for reuse.
    pub reserved: u64,
    /// Limit that [`set_capacity`] has set. `None` if only the host's memory is the limit.
    pub capacity: Option<u64>,
}

/// Makes libtorch report this many CUDA devices. A second call with the same number does nothing.
///
/// # Errors
///
/// Fails if the program is linked with CUDA itself, if another number is installed, and for less than 1 device or more
/// than 16.
pub fn install(devices: usize) -> Result<(), FakeError> {
    let devices = i32::try_from(devices).unwrap_or(i32::MAX);
    // SAFETY: takes a number.
    ffi::result(unsafe { ffi::fake_gpu_install(devices) })?;
    brigade_torch::record_graphs_with(Box::new(graphs::Recorder));
    INSTALLED.store(true, Ordering::Relaxed);
    Ok(())
}

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Returns `true` if [`install`] has succeeded.
#[must_use]
pub fn is_installed() -> bool {
    INSTALLED.load(Ordering::Relaxed)
}

/// Name of a thread's wait for the stream that it computes on besides the training streams, other than the default one:
/// a thread that reads data waits so when it ends, and no training step waits for it.
pub const SIDE_STREAM: &str = "synchronize: side stream";

/// Returns the names of the points at which the host waited for a device while the function ran, on any thread.
///
/// The names are those of real CUDA: operators by name (`aten::nonzero`, and `aten::_local_scalar_dense` for `item`),
/// `copy: host to device` and `copy: device to host` for copies that are not both `non_blocking` and with pinned
/// memory, and `synchronize: stream`, `synchronize: event`, `synchronize: device`. [`SIDE_STREAM`] is a thread's wait
/// for an event of its own stream. With the variable `BRIGADE_FAKE_GPU_BACKTRACE`, each wait writes its backtrace to
/// stderr.
pub fn synchronizations(function: impl FnOnce()) -> Vec<String> {
    struct Listening(Option<u64>);
    impl Listening {
        fn heard(&mut self) -> String {
            let Some(since) = self.0.take() else { return String::new() };
            // SAFETY: takes the number that fake_gpu_listen returned, once.
            ffi::text(unsafe { ffi::fake_gpu_heard(since) }).unwrap_or_default()
        }
    }
    impl Drop for Listening {
        fn drop(&mut self) {
            self.heard();
        }
    }
    // SAFETY: takes nothing.
    let mut listening = Listening(Some(unsafe { ffi::fake_gpu_listen() }));
    function();
    let names = listening.heard();
    names.lines().map(str::to_owned).collect()
}

/// Scope of [`random_delays`].
#[derive(Debug)]
pub struct RandomDelays(());

/// Makes copies end at random times, until the value is dropped: at some of them, and at some allocations, a few of the
/// copies that a stream has put off are made, in the stream's order. Otherwise all are put off as long as possible. The
/// same seed gives the same times, as far as the program's threads do the same in the same order.
#[must_use]
pub fn random_delays(seed: u64) -> RandomDelays {
    // A generator of this kind stays at 0.
    let seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    // SAFETY: takes a number.
    unsafe { ffi::fake_gpu_random_delays(seed) };
    RandomDelays(())
}

impl Drop for RandomDelays {
    fn drop(&mut self) {
        // SAFETY: takes a number.
        unsafe { ffi::fake_gpu_random_delays(0) };
    }
}

/// Returns the devices on which memory was allocated, an operator was run or a stream was created: a real device has a
/// context from then on, which costs hundreds of megabytes.
#[must_use]
pub fn contexts() -> Vec<usize> {
    // SAFETY: takes nothing.
    let found = unsafe { ffi::fake_gpu_contexts() };
    (0..64).filter(|device| found >> device & 1 == 1).collect()
}

/// Sets the memory capacity of a device. Exceeding it is an error of libtorch, with the message of the one for CUDA.
///
/// # Errors
///
/// Fails if the device does not exist.
pub fn set_capacity(device: usize, bytes: u64) -> Result<(), FakeError> {
    // SAFETY: takes numbers.
    ffi::result(unsafe { ffi::fake_gpu_set_capacity(index(device), bytes) })
}

/// Returns the memory statistics of a device.
///
/// # Errors
///
/// Fails if the device does not exist.
pub fn memory(device: usize) -> Result<Memory, FakeError> {
    let mut memory = ffi::Memory::default();
    // SAFETY: writes into the structure, whose fields are those of the C++ side.
    ffi::result(unsafe { ffi::fake_gpu_memory(index(device), &raw mut memory) })?;
    let ffi::Memory { allocated, peak, reserved, capacity } = memory;
    Ok(Memory { allocated, peak, reserved, capacity: (capacity > 0).then_some(capacity) })
}

/// Returns the memory that a device keeps for reuse to the host, after the deferred work of its streams.
///
/// # Errors
///
/// Fails if the device does not exist.
pub fn empty_cache(device: usize) -> Result<(), FakeError> {
    // SAFETY: takes a number.
    ffi::result(unsafe { ffi::fake_gpu_empty_cache(index(device)) })
}

/// Sets the current device of this thread, which is used where no index is given.
///
/// # Errors
///
/// Fails if the device does not exist.
pub fn set_current_device(device: usize) -> Result<(), FakeError> {
    // SAFETY: takes a number.
    ffi::result(unsafe { ffi::fake_gpu_set_device(index(device)) })
}

/// Stream of a device, besides the default one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    device: i32,
    id: i64,
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    ///
    /// Fails if the device does not exist.
    pub fn new(device: usize) -> Result<Self, FakeError> {
        let (device, mut id) = (index(device), 0);
        // SAFETY: writes the stream's number.
        ffi::result(unsafe { ffi::fake_gpu_new_stream(device, &raw mut id) })?;
        Ok(Self { device, id })
    }

    /// Runs the function with this stream as the current stream of its device in this thread.
    ///
    /// # Panics
    ///
    /// Never panics in practice: the device of a stream always exists.
    pub fn run<T>(&self, function: impl FnOnce() -> T) -> T {
        struct Previous(Stream);
        impl Drop for Previous {
            fn drop(&mut self) {
                let mut ignored = 0;
                // SAFETY: takes numbers of a stream that was the current one, and writes one.
                ffi::text(unsafe {
                    ffi::fake_gpu_exchange_stream(self.0.device, self.0.id, &raw mut ignored)
                });
            }
        }
        let mut previous = 0;
        // SAFETY: takes numbers of an existing stream, and writes one.
        let set = unsafe { ffi::fake_gpu_exchange_stream(self.device, self.id, &raw mut previous) };
        ffi::result(set).expect("the stream's device is there");
        let _previous = Previous(Self { device: self.device, id: previous });
        function()
    }

    /// Waits for all work on the stream, which is a synchronisation.
    ///
    /// # Errors
    ///
    /// Fails while a graph is captured.
    pub fn synchronize(&self) -> Result<(), FakeError> {
        // SAFETY: takes numbers of an existing stream.
        ffi::result(unsafe { ffi::fake_gpu_synchronize_stream(self.device, self.id) })
    }

    /// Returns `true` if no work is deferred, without running any of it.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        // SAFETY: takes numbers of an existing stream.
        unsafe { ffi::fake_gpu_stream_is_drained(self.device, self.id) }
    }

    /// Records an event after the current work of the stream.
    ///
    /// # Errors
    ///
    /// Never fails in practice: the device of a stream always exists.
    pub fn record(&self) -> Result<Event, FakeError> {
        let mut event = ptr::null_mut();
        // SAFETY: writes the event that it makes.
        ffi::result(unsafe { ffi::fake_gpu_record_event(self.device, self.id, &raw mut event) })?;
        Ok(Event(event))
    }
}

/// Point in the work of a stream.
#[derive(Debug)]
pub struct Event(*mut c_void);

impl Event {
    /// Makes the current stream wait for the work before the event. This is not a synchronisation, since the host does
    /// not wait.
    ///
    /// # Errors
    ///
    /// Returns the error of a deferred operation.
    pub fn wait(&self) -> Result<(), FakeError> {
        // SAFETY: the event exists until it is dropped.
        ffi::result(unsafe { ffi::fake_gpu_wait_event(self.0) })
    }

    /// Waits for the work before the event, which is a synchronisation.
    ///
    /// # Errors
    ///
    /// Fails while a graph is captured.
    pub fn synchronize(&self) -> Result<(), FakeError> {
        // SAFETY: the event exists until it is dropped.
        ffi::result(unsafe { ffi::fake_gpu_synchronize_event(self.0) })
    }

    /// Returns `true` if the work before the event is done. Each call that returns `false` runs one deferred operation,
    /// so that polling comes to an end.
    ///
    /// # Errors
    ///
    /// Fails while a graph is captured.
    pub fn query(&self) -> Result<bool, FakeError> {
        let mut done = false;
        // SAFETY: the event exists until it is dropped; writes one bool.
        ffi::result(unsafe { ffi::fake_gpu_query_event(self.0, &raw mut done) })?;
        Ok(done)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by fake_gpu_record_event, and freed here alone.
        unsafe { ffi::fake_gpu_free_event(self.0) };
    }
}

/// Records that a stream uses a tensor's memory: it is reused only after the work that the stream has at the time of
/// the free.
///
/// # Errors
///
/// Fails for a tensor that is not on a GPU.
pub fn record_stream(tensor: &Tensor, stream: &Stream) -> Result<(), FakeError> {
    // SAFETY: the tensor lives during the call, and tch's pointer is one to libtorch's class.
    ffi::result(unsafe {
        ffi::fake_gpu_record_stream(tensor.as_ptr().cast(), stream.device, stream.id)
    })
}

/// Copies into a tensor with `non_blocking`, which tch's `copy_` lacks, on the current stream.
///
/// # Errors
///
/// Fails for shapes that cannot be broadcast.
pub fn copy_non_blocking(to: &mut Tensor, from: &Tensor) -> Result<(), FakeError> {
    // SAFETY: both tensors live during the call, and tch's pointers are ones to libtorch's class.
    ffi::result(unsafe { ffi::fake_gpu_copy(to.as_ptr().cast(), from.as_ptr().cast()) })
}

/// Captured operators, to be run again on the same memory.
#[derive(Debug)]
pub struct Graph(*mut c_void);

impl Graph {
    /// Takes ownership of a graph from fake_gpu_end_capture.
    fn from_raw(graph: *mut c_void) -> Self {
        Self(graph)
    }

    /// Captures the operators that the function runs on the device, in any thread. Memory and generator are then
    /// restored.
    ///
    /// # Errors
    ///
    /// Fails if another graph is being captured, or if the function has waited for the device or copied between it and
    /// memory that is not pinned.
    ///
    /// # Panics
    ///
    /// Panics if the function does, after the end of the capture.
    pub fn capture(device: usize, function: impl FnOnce()) -> Result<Self, FakeError> {
        // SAFETY: takes a number.
        ffi::result(unsafe { ffi::fake_gpu_begin_capture(index(device)) })?;
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(function));
        let mut graph = ptr::null_mut();
        // SAFETY: writes the graph that it makes.
        let ended = ffi::result(unsafe { ffi::fake_gpu_end_capture(&raw mut graph) });
        let graph = ended.map(|()| Self(graph));
        if let Err(panic) = ran {
            std::panic::resume_unwind(panic);
        }
        graph
    }

    /// Runs the captured operators again: their results are in the memory of the captured results. Random operators
    /// continue with the device's generator.
    ///
    /// # Errors
    ///
    /// Returns the error of an operator.
    pub fn replay(&self) -> Result<(), FakeError> {
        // SAFETY: the graph exists until it is dropped.
        ffi::result(unsafe { ffi::fake_gpu_replay(self.0) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by fake_gpu_end_capture, and freed here alone.
        unsafe { ffi::fake_gpu_free_graph(self.0) };
    }
}

/// Returns `true` if a graph of the device is being captured.
#[must_use]
pub fn is_capturing(device: usize) -> bool {
    // SAFETY: takes a number.
    unsafe { ffi::fake_gpu_is_capturing(index(device)) }
}

/// Returns the address of the table `FakeGpuGraphs` of `cpp/fake_gpu.h`: functions that begin, end, replay and free
/// graphs, for a C++ library that does not link with this crate.
#[must_use]
pub fn graph_functions() -> *const c_void {
    // SAFETY: takes nothing; the table lives as long as the program.
    unsafe { ffi::fake_gpu_graphs() }
}

/// Converts an index for the C++ side; -1 for one that is too large.
fn index(device: usize) -> i32 {
    // The C++ side stores indices in a signed byte.
    i32::try_from(device).ok().filter(|it| *it <= 127).unwrap_or(-1)
}
