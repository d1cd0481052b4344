//! Throughput of a run, and the memory that it uses.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use brigade_torch::DeviceMemory;
use brigade_track::{Value, Values};
use tch::Device;

use crate::processes::Processes;

/// Measures throughput and step times over a window of the last steps. Made by [`Processes::meter`].
///
/// Rates are totals of all ranks, on the assumption that each has processed as much as this one.
///
/// ```
/// # use brigade_train::Accelerator;
/// # let folder = std::env::temp_dir().join(format!("brigade-meter-{}", std::process::id()));
/// # let accelerator = Accelerator::builder().cpu(true).logging_dir(&folder).build()?;
/// # accelerator.trackers().start("digits", &())?;
/// let mut meter = accelerator.processes().meter(50);
/// for step in 0..1000 {
///     // … a step with 64 samples …
///     meter.step(64);
///     if step % 50 == 49 {
///         accelerator.log(meter.values(), step)?;
///     }
/// }
/// # accelerator.trackers().finish()?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Meter {
    ranks: usize,
    device: Device,
    window: usize,
    /// End of each step, with the numbers of samples and tokens so far. The first entry is the start of the
    /// measurement.
    ends: VecDeque<(Instant, u64, u64)>,
}

/// Throughput and step times that a [`Meter`] measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Samples per second of all ranks together.
    pub samples_per_second: f64,
    /// Tokens per second of all ranks together. 0 if no tokens were counted.
    pub tokens_per_second: f64,
    /// Mean time of a step.
    pub step: Duration,
    /// Longest time of a step.
    pub slowest_step: Duration,
    /// Number of steps in the window.
    pub steps: usize,
}

/// Memory of this process in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident memory: bytes in main memory now.
    pub resident: u64,
    /// Peak of the resident memory.
    pub peak: u64,
}

impl Processes {
    /// Returns a meter over the last `window` steps, at least one, that starts now.
    #[must_use]
    pub fn meter(&self, window: usize) -> Meter {
        Meter::starting_at(Instant::now(), window, self.num_processes(), self.device())
    }
}

impl Meter {
    fn starting_at(now: Instant, window: usize, ranks: usize, device: Device) -> Self {
        Self { ranks, device, window: window.max(1), ends: VecDeque::from([(now, 0, 0)]) }
    }

    /// Records the end of a step, with the number of samples that this rank processed in it.
    pub fn step(&mut self, samples: usize) {
        self.ended(Instant::now(), samples as u64, 0);
    }

    /// Records the end of a step as [`Meter::step`] does, with its number of tokens.
    pub fn step_with_tokens(&mut self, samples: usize, tokens: usize) {
        self.ended(Instant::now(), samples as u64, tokens as u64);
    }

    /// Excludes the time since the last step from the measurement: an evaluation or a checkpoint between two steps.
    pub fn pause_ended(&mut self) {
        self.resume(Instant::now());
    }

    /// Returns the rates of the window. `None` before the first step.
    #[must_use]
    pub fn rates(&self) -> Option<Rates> {
        let (first, last) = (self.ends.front()?.0, self.ends.back()?.0);
        let steps = self.ends.len() - 1;
        if steps == 0 {
            return None;
        }
        let counted = self.ends.iter().skip(1);
        let (samples, tokens) =
            counted.fold((0, 0), |(samples, tokens), it| (samples + it.1, tokens + it.2));
        let time = last.duration_since(first);
        let per_second = |count: u64| {
            // If the clock has not advanced, the rate would be infinite.
            let seconds = time.as_secs_f64().max(1e-9);
            count as f64 * self.ranks as f64 / seconds
        };
        let pairs = self.ends.iter().zip(self.ends.iter().skip(1));
        Some(Rates {
            samples_per_second: per_second(samples),
            tokens_per_second: per_second(tokens),
            step: time / u32::try_from(steps).unwrap_or(u32::MAX),
            slowest_step: pairs.map(|(a, b)| b.0.duration_since(a.0)).max().unwrap_or_default(),
            steps,
        })
    }

    /// Returns rates and memory as named values for [`crate::Accelerator::log`]: `samples_per_second`,
    /// `tokens_per_second` where tokens were counted, `step_ms`, `slowest_step_ms`, `resident_mib`, `peak_mib`, and on
    /// a GPU `gpu_allocated_mib`, `gpu_peak_mib`, `gpu_reserved_mib`. Unknown values are left out.
    #[must_use]
    pub fn values(&self) -> Values {
        let mut values = Values::new();
        let mut put = |name: &str, value: f64| values.push((name.to_owned(), Value::from(value)));
        if let Some(rates) = self.rates() {
            put("samples_per_second", rates.samples_per_second);
            if rates.tokens_per_second > 0.0 {
                put("tokens_per_second", rates.tokens_per_second);
            }
            put("step_ms", rates.step.as_secs_f64() * 1e3);
            put("slowest_step_ms", rates.slowest_step.as_secs_f64() * 1e3);
        }
        if let Some(memory) = ProcessMemory::now() {
            put("resident_mib", memory.resident as f64 / MIB);
            put("peak_mib", memory.peak as f64 / MIB);
        }
        // Before the first tensor on the device, the allocator returns an error.
        if let Ok(Some(memory)) = DeviceMemory::of(self.device) {
            put("gpu_allocated_mib", memory.allocated as f64 / MIB);
            put("gpu_peak_mib", memory.peak as f64 / MIB);
            put("gpu_reserved_mib", memory.reserved as f64 / MIB);
        }
        values
    }

    fn ended(&mut self, now: Instant, samples: u64, tokens: u64) {
        self.ends.push_back((now, samples, tokens));
        while self.ends.len() > self.window + 1 {
            self.ends.pop_front();
        }
    }

    /// Shifts the recorded times to now: only differences of times matter.
    fn resume(&mut self, now: Instant) {
        let Some(last) = self.ends.back().map(|end| end.0) else { return };
        let away = now.duration_since(last);
        for end in &mut self.ends {
            end.0 += away;
        }
    }
}

impl ProcessMemory {
    /// Reads the memory of this process from the operating system. `None` on systems other than Linux.
    #[must_use]
    pub fn now() -> Option<Self> {
        Self::of(&std::fs::read_to_string("/proc/self/status").ok()?)
    }

    fn of(status: &str) -> Option<Self> {
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            kibibytes.checked_mul(1024)
        };
        Some(Self { resident: bytes("VmRSS:")?, peak: bytes("VmHWM:")? })
    }
}

const MIB: f64 = (1u64 << 20) as f64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_window_and_of_all_ranks() {
        let began = Instant::now();
        let at = |milliseconds| began + Duration::from_millis(milliseconds);
        let mut meter = Meter::starting_at(began, 2, 4, Device::Cpu);
        assert_eq!(meter.rates(), None);
        meter.ended(at(1000), 1000, 0);
        meter.ended(at(1100), 10, 100);
        meter.ended(at(1400), 30, 300);
        let rates = meter.rates().unwrap();
        assert_eq!(rates.steps, 2);
        assert!((rates.samples_per_second - 4.0 * 40.0 / 0.4).abs() < 1e-9, "{rates:?}");
        assert!((rates.tokens_per_second - 4.0 * 400.0 / 0.4).abs() < 1e-9);
        assert_eq!(rates.step, Duration::from_millis(200));
        assert_eq!(rates.slowest_step, Duration::from_millis(300));
        // An evaluation of a minute in between does not count as time of the steps.
        meter.resume(at(61_400));
        meter.ended(at(61_600), 30, 300);
        let rates = meter.rates().unwrap();
        assert_eq!(rates.slowest_step, Duration::from_millis(300));
        assert!((rates.samples_per_second - 4.0 * 60.0 / 0.5).abs() < 1e-6);
    }

    #[test]
    fn a_stopped_clock_gives_a_finite_rate() {
        let began = Instant::now();
        let mut meter = Meter::starting_at(began, 0, 1, Device::Cpu);
        meter.ended(began, 5, 0);
        assert!(meter.rates().unwrap().samples_per_second.is_finite());
    }

    #[test]
    fn the_system_says_how_much_memory_there_is() {
        let status = "Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n";
        let expected = ProcessMemory { resident: 1 << 20, peak: 2 << 20 };
        assert_eq!(ProcessMemory::of(status), Some(expected));
        assert_eq!(ProcessMemory::of("VmRSS:\t1 kB\n"), None);
        let memory = ProcessMemory::now().unwrap();
        assert!(memory.peak >= memory.resident && memory.resident > 1 << 20);
    }
}
