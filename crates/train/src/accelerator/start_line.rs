//! What was decided, in one line on the main process.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::Ordering;

use brigade_torch::Device;

use crate::accelerator::Accelerator;
use crate::precision::{Precision, caveat};

impl Accelerator {
    /// Once, when the first model is prepared: before, the memory format is not known.
    pub(crate) fn say_start(&self, channels_last: bool) {
        if self.options.quiet || !self.is_main_process() || self.said.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let mut lines = format!("brigade: {}\n", self.choices(channels_last));
        if let Some(caveat) = caveat(self.mixed_precision(), self.device()) {
            let _ = writeln!(lines, "brigade: {caveat}");
        }
        // Not on standard output, which may be the program's result. A reader that went away must not
        // end the training.
        let _ = std::io::stderr().lock().write_all(lines.as_bytes());
    }

    fn choices(&self, channels_last: bool) -> String {
        let plural = |number: usize, one: &str, several: &str| {
            format!("{number} {}", if number == 1 { one } else { several })
        };
        let device = match self.device() {
            Device::Cpu => format!("cpu with {}", plural(threads(), "thread", "threads")),
            Device::Cuda(index) => format!("cuda:{index}"),
            other => format!("{other:?}").to_lowercase(),
        };
        let precision = match self.mixed_precision() {
            Precision::No => "no mixed precision".to_owned(),
            precision => precision.to_string(),
        };
        let format = if channels_last { "channels last" } else { "contiguous" };
        let mut line = plural(self.num_processes(), "process", "processes");
        let _ = write!(line, ", {device}, {precision}, {format}");
        if self.gradient_accumulation_steps() > 1 {
            let _ = write!(line, ", gradients of {} batches", self.gradient_accumulation_steps());
        }
        line
    }
}

fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}
