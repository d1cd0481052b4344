//! The banner: one line on the main process with the settings of the run.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::Ordering;

use brigade_sharding::{ShardingPlan, Workload};
use brigade_torch::{CudaUnavailable, DeviceExt};
use tch::Device;

use crate::accelerator::Accelerator;
use crate::model::PreparedModel;
use crate::precision::{Precision, caveat};

/// Contents of the banner.
#[derive(Debug)]
struct Start {
    processes: usize,
    device: Device,
    /// Number of threads that the CPU uses.
    threads: usize,
    /// Reason why the device is the CPU in a program that was built for GPUs.
    missing_gpu: Option<CudaUnavailable>,
    /// Name of the GPU model.
    hardware: Option<String>,
    precision: Precision,
    /// `true` if products of float32 tensors are computed in TF32.
    tf32: bool,
    channels_last: bool,
    /// Number of batches of a full accumulation window.
    batches: usize,
    /// Warnings about the device, a line each.
    caveats: Vec<String>,
}

impl Accelerator {
    /// Prints the banner once, when the first model is prepared: the memory format is not available earlier.
    pub(crate) fn print_banner(&self, channels_last: bool) {
        if self.options.quiet
            || !self.is_main_process()
            || self.banner_printed.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let start = Start {
            processes: self.processes.num_processes(),
            device: self.device(),
            threads: usize::try_from(tch::get_num_threads()).unwrap_or(1),
            missing_gpu: self.processes.job.missing_gpu.clone(),
            hardware: self
                .device()
                .device_kind()
                .and_then(|(kind, index)| kind.hardware(index).ok()),
            precision: self.mixed_precision(),
            tf32: self.numerics.tf32 && self.device() != Device::Cpu,
            channels_last,
            batches: self.gradients.accumulator.steps(),
            caveats: self.caveats(),
        };
        // Not on standard output, which may be the program's result. A closed stream must not end the training.
        let _ = std::io::stderr().lock().write_all(start.lines().as_bytes());
    }

    /// Prints the sharding plan once, when the first model is sharded: each rank's share and messages.
    pub(crate) fn print_plan<M>(&self, model: &PreparedModel<M>) {
        let Some(sharder) = model.sharder() else { return };
        if self.options.quiet
            || !self.is_main_process()
            || self.plan_printed.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let steps = self.gradients.accumulator.steps() as u64;
        let lines = plan_lines(sharder.plan(), steps);
        let _ = std::io::stderr().lock().write_all(lines.as_bytes());
    }

    fn caveats(&self) -> Vec<String> {
        let products =
            (self.device() == Device::Cpu).then(|| self.processes.job.products.caveat()).flatten();
        let precision = caveat(self.mixed_precision(), self.device());
        products.map(str::to_owned).into_iter().chain(precision).collect()
    }
}

/// Returns a line with strategy, units, bytes per rank and bytes of a step's messages, and one line per remark.
fn plan_lines(plan: &ShardingPlan, micro_batches: u64) -> String {
    let memory = plan.memory(Workload { states: 1, ..Workload::default() });
    let sent = plan.volume(micro_batches).bytes();
    let [parameters, gradients, optimizer, gathered, sent] =
        [memory.parameters, memory.gradients, memory.optimizer, memory.gathered, sent]
            .map(megabytes);
    let mut lines = format!(
        "brigade: {plan}; on each rank {parameters} of parameters, {gradients} of gradients, {optimizer} for each \
         state of the optimizer, {gathered} gathered; {sent} sent in a step\n"
    );
    for note in plan.notes() {
        let _ = writeln!(lines, "brigade: {note}");
    }
    lines
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

impl Start {
    fn lines(&self) -> String {
        let plural = |number: usize, one: &str, several: &str| {
            format!("{number} {}", if number == 1 { one } else { several })
        };
        let device = match self.device {
            Device::Cpu => {
                let reason = self.missing_gpu.as_ref().map(|it| format!(" ({it})"));
                let threads = plural(self.threads, "thread", "threads");
                format!("cpu with {threads}{}", reason.unwrap_or_default())
            }
            device => match &self.hardware {
                Some(hardware) => format!("{} ({hardware})", device.label()),
                None => device.label(),
            },
        };
        let precision = match self.precision {
            Precision::No if self.tf32 => "no mixed precision (TF32)".to_owned(),
            Precision::No => "no mixed precision".to_owned(),
            precision => precision.to_string(),
        };
        let format = if self.channels_last { "channels last" } else { "contiguous" };
        let processes = plural(self.processes, "process", "processes");
        let mut lines = format!("brigade: {processes}, {device}, {precision}, {format}");
        if self.batches > 1 {
            let _ = write!(lines, ", gradients of {} batches", self.batches);
        }
        lines.push('\n');
        for caveat in &self.caveats {
            let _ = writeln!(lines, "brigade: {caveat}");
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_was_decided() {
        let start = Start {
            processes: 1,
            device: Device::Cpu,
            threads: 2,
            missing_gpu: None,
            hardware: None,
            precision: Precision::No,
            tf32: false,
            channels_last: true,
            batches: 1,
            caveats: Vec::new(),
        };
        let expected =
            "brigade: 1 process, cpu with 2 threads, no mixed precision, channels last\n";
        assert_eq!(start.lines(), expected);
        let slow = Start {
            processes: 4,
            threads: 1,
            precision: Precision::Bf16,
            channels_last: false,
            batches: 3,
            caveats: vec!["this CPU is slow at it".into()],
            ..start
        };
        let expected = "brigade: 4 processes, cpu with 1 thread, bf16, contiguous, gradients of 3 batches\n\
                        brigade: this CPU is slow at it\n";
        assert_eq!(slow.lines(), expected);
        let no_driver = Start {
            processes: 2,
            missing_gpu: Some(CudaUnavailable::NoDriver),
            batches: 1,
            caveats: Vec::new(),
            ..slow
        };
        let expected = "brigade: 2 processes, cpu with 1 thread (there is no NVIDIA driver), bf16, contiguous\n";
        assert_eq!(no_driver.lines(), expected);
        let hardware = Some("NVIDIA H200".to_owned());
        let gpu =
            Start { device: Device::Cuda(1), processes: 4, batches: 3, hardware, ..no_driver };
        let expected = "brigade: 4 processes, cuda:1 (NVIDIA H200), bf16, contiguous, gradients of 3 batches\n";
        assert_eq!(gpu.lines(), expected);
        let tf32 =
            Start { precision: Precision::No, tf32: true, hardware: None, batches: 1, ..gpu };
        let expected = "brigade: 4 processes, cuda:1, no mixed precision (TF32), contiguous\n";
        assert_eq!(tf32.lines(), expected);
    }
}
