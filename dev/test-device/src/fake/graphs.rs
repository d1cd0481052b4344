//! Makes brigade-torch record its graphs on GPUs made of host memory.

use std::ptr;

use brigade_torch::{GraphRecorder, RecordedGraph};

use super::Graph;
use crate::ffi;

/// Recorder of what the calling thread, and those of autograd, run on a device.
pub(super) struct Recorder;

impl GraphRecorder for Recorder {
    fn begin(&self, device: usize) -> Result<(), String> {
        let device = i32::try_from(device).unwrap_or(-1);
        // SAFETY: takes a number.
        ffi::result(unsafe { ffi::fake_gpu_begin_capture(device) })
            .map_err(|error| error.to_string())
    }

    fn end(&self) -> Result<Box<dyn RecordedGraph>, String> {
        let mut graph = ptr::null_mut();
        // SAFETY: writes the graph that it makes.
        ffi::result(unsafe { ffi::fake_gpu_end_capture(&raw mut graph) })
            .map_err(|error| error.to_string())?;
        Ok(Box::new(Recorded(Graph::from_raw(graph))))
    }
}

struct Recorded(Graph);

// SAFETY: a graph is a list of operators with their tensors, which no thread is bound to.
unsafe impl Send for Recorded {}

impl RecordedGraph for Recorded {
    fn replay(&mut self) -> Result<(), String> {
        self.0.replay().map_err(|error| error.to_string())
    }
}
