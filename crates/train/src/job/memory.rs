//! Adds the state of the memory to errors about a GPU's memory.

use brigade_torch::{DeviceExt, DeviceMemory, Result};

use crate::error::{OutOfMemory, TrainError};
use crate::job::Job;

impl Job {
    /// Adds the state of memory to an error about a GPU's memory. Returns other errors, and those of the CPU,
    /// unchanged.
    pub(crate) fn explain_memory<T>(&self, during: &'static str, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| {
            let Some((kind, index)) = self.device.device_kind() else { return error };
            if error.downcast_ref::<TrainError>().is_some() || !error.is_out_of_memory() {
                return error;
            }
            let text = error.to_string();
            // The remaining lines are advice about libtorch's allocator, and a backtrace.
            let detail = text.lines().next().unwrap_or_default().to_owned();
            let memory = OutOfMemory {
                rank: self.rank(),
                device: self.device.label(),
                during,
                detail,
                driver: kind.memory(index).ok(),
                allocator: DeviceMemory::of(self.device).ok().flatten(),
                plan: self.memory_plan.lock().clone(),
            };
            TrainError::OutOfMemory(Box::new(memory)).into()
        })
    }
}
