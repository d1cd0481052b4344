//! The banner: one line on the main process with the settings of the run.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::Ordering;

use brigade_sharding::{ShardingPlan, Workload};
use brigade_torch::{DeviceExt, DeviceUnavailable, KernelState, prepare_kernels};
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
    /// Reason why the device is the CPU in a program that was built for others.
    missing_gpu: Option<DeviceUnavailable>,
    /// Name of the GPU model.
    hardware: Option<String>,
    precision: Precision,
    /// `true` if products of float32 tensors are computed in TF32.
    tf32: bool,
    channels_last: bool,
    /// Brigade's kernels on a GPU.
    kernels: Vec<KernelState>,
    /// Number of batches of a full accumulation window.
    batches: usize,
    /// Warnings about the device, a line each.
    caveats: Vec<String>,
}

impl Accelerator {
    /// Prepares the GPU kernels and prints the banner, once, when the first model is prepared: the memory format is not
    /// available earlier.
    pub(crate) fn print_banner(&self, channels_last: bool) {
        if self.banner_printed.swap(true, Ordering::Relaxed) {
            return;
        }
        // An error of CUDA is reported by the first operation.
        let kernels =
            prepare_kernels(self.device(), self.mixed_precision().kind()).unwrap_or_default();
        if self.options.quiet || !self.is_main_process() {
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
            tf32: self.numerics.tf32 && self.device().has_streams(),
            channels_last,
            kernels,
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
        if let Some(kernels) = self.kernels_line() {
            let _ = writeln!(lines, "brigade: {kernels}");
        }
        for caveat in &self.caveats {
            let _ = writeln!(lines, "brigade: {caveat}");
        }
        lines
    }

    /// Returns the kernels that are used, and the reason for each of the others. `None` without a GPU.
    fn kernels_line(&self) -> Option<String> {
        if self.kernels.is_empty() {
            return None;
        }
        let used: Vec<&str> = self
            .kernels
            .iter()
            .filter(|state| state.reason.is_none())
            .map(|state| state.name.as_str())
            .collect();
        let mut line = if used.is_empty() {
            "no kernels of its own".to_owned()
        } else {
            format!("kernels {}", used.join(", "))
        };
        for (i, state) in self.kernels.iter().filter(|state| state.reason.is_some()).enumerate() {
            let reason = state.reason.as_deref().unwrap_or_default();
            // Messages of a compiler have several lines.
            let reason = reason.lines().next().unwrap_or_default();
            let separator = if i == 0 { "; not used:" } else { "," };
            let _ = write!(line, "{separator} {} ({reason})", state.name);
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use brigade_torch::{CudaUnavailable, TpuUnavailable};

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
            kernels: Vec::new(),
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
            missing_gpu: Some(CudaUnavailable::NoDriver.into()),
            batches: 1,
            caveats: Vec::new(),
            ..slow
        };
        let expected = "brigade: 2 processes, cpu with 1 thread (there is no NVIDIA driver), bf16, contiguous\n";
        assert_eq!(no_driver.lines(), expected);
        let missing_gpu = Some(TpuUnavailable::NotInstalled.into());
        let no_tpu = Start { missing_gpu, ..no_driver };
        let expected = "brigade: 2 processes, cpu with 1 thread (TorchTPU is not installed: run `brigade setup --tpu`), \
                        bf16, contiguous\n";
        assert_eq!(no_tpu.lines(), expected);
        let hardware = Some("NVIDIA H200".to_owned());
        let gpu = Start { device: Device::Cuda(1), processes: 4, batches: 3, hardware, ..no_tpu };
        let expected = "brigade: 4 processes, cuda:1 (NVIDIA H200), bf16, contiguous, gradients of 3 batches\n";
        assert_eq!(gpu.lines(), expected);
        let state = |name: &str, reason: Option<&str>| KernelState {
            name: name.into(),
            reason: reason.map(Into::into),
        };
        let off = |name| state(name, Some("off by BRIGADE_FUSED"));
        let both = Start { kernels: vec![state("a", None), state("b", None)], batches: 1, ..gpu };
        let lines =
            |start: &Start| start.lines().lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(lines(&both), ["brigade: kernels a, b"]);
        let one = Start { kernels: vec![off("a"), state("b", None)], ..both };
        assert_eq!(lines(&one), ["brigade: kernels b; not used: a (off by BRIGADE_FUSED)"]);
        let failed = state("b", Some("cannot be compiled\nat line 3"));
        let none = Start { kernels: vec![off("a"), failed], ..one };
        assert_eq!(
            lines(&none),
            [
                "brigade: no kernels of its own; not used: a (off by BRIGADE_FUSED), b (cannot be compiled)"
            ]
        );
        let gpu = Start { kernels: Vec::new(), ..none };
        let tf32 =
            Start { precision: Precision::No, tf32: true, hardware: None, batches: 1, ..gpu };
        let expected = "brigade: 4 processes, cuda:1, no mixed precision (TF32), contiguous\n";
        assert_eq!(tf32.lines(), expected);
    }
}
