//! Profiles of a training loop: the time and memory of its operations.

mod summary;

use std::fmt;
use std::path::PathBuf;

use brigade_torch::{DeviceExt, Error, ProfiledEvent, ProfilerOptions, Recording, Result, Scope};

pub use summary::{OperationSummary, Table};

use crate::error::TrainError;
use crate::processes::Processes;

/// Options of a profile with [`crate::Accelerator::profile`].
#[derive(Debug, Clone, Default)]
pub struct ProfileOptions {
    /// Folder in which each rank writes `trace_rankN.json`, for `chrome://tracing` and
    /// [Perfetto](https://ui.perfetto.dev); further cycles of the schedule are `trace_rankN.2.json` and so on. Defaults
    /// to `None`: no file is written.
    pub trace_dir: Option<PathBuf>,
    /// Schedule of the recorded steps. Defaults to `None`: all steps are recorded.
    pub schedule: Option<ProfileSchedule>,
    /// `true` if the shapes of the operations' inputs are recorded. Defaults to `false`.
    pub shapes: bool,
    /// `true` if allocations and deallocations of memory are recorded. Defaults to `false`.
    pub memory: bool,
    /// `true` if floating-point operations are counted, for operations whose formula libtorch has (matrix products,
    /// convolutions). Requires `shapes`. Defaults to `false`.
    pub flops: bool,
}

/// Schedule of the recorded steps, as `torch.profiler.schedule`: the first `skip_first` steps are not recorded; then,
/// in cycles, `wait` steps are not recorded, `warmup` steps are recorded and discarded (the profiler's first steps are
/// slower), and `active` steps are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileSchedule {
    /// Number of steps left out once, at the start. Defaults to 0.
    pub skip_first: usize,
    /// Number of steps left out at the beginning of each cycle. Defaults to 1.
    pub wait: usize,
    /// Number of steps in each cycle that are recorded and discarded. Defaults to 1.
    pub warmup: usize,
    /// Number of steps in each cycle that are kept, at least 1. Defaults to 3.
    pub active: usize,
    /// Number of cycles. Defaults to 1; 0 repeats them to the end of the loop.
    pub repeat: usize,
}

impl Default for ProfileSchedule {
    fn default() -> Self {
        Self { skip_first: 0, wait: 1, warmup: 1, active: 3, repeat: 1 }
    }
}

/// Phase of a step in the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    WarmUp,
    Record,
    /// Records the last step of a cycle, then saves.
    RecordAndSave,
}

impl ProfileSchedule {
    fn phase(&self, step: usize) -> Phase {
        let Self { skip_first, wait, warmup, active, repeat } = *self;
        let Some(step) = step.checked_sub(skip_first) else {
            return Phase::Idle;
        };
        let cycle = wait + warmup + active;
        if repeat > 0 && step / cycle >= repeat {
            return Phase::Idle;
        }
        match step % cycle {
            place if place < wait => Phase::Idle,
            place if place < wait + warmup => Phase::WarmUp,
            place if place + 1 < cycle => Phase::Record,
            _ => Phase::RecordAndSave,
        }
    }
}

/// Marks the steps of a profiled loop. Passed to the body of [`crate::Accelerator::profile`].
pub struct Profiler {
    options: ProfileOptions,
    recorded: ProfilerOptions,
    rank: usize,
    step: usize,
    state: State,
    scope: Option<Scope>,
    profile: Profile,
}

enum State {
    Idle,
    WarmUp(Recording),
    Record(Recording),
}

/// The recording of [`crate::Accelerator::profile`] on this rank.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// Recorded events of all cycles.
    pub events: Vec<ProfiledEvent>,
    /// Paths of the trace files, one for each cycle.
    pub traces: Vec<PathBuf>,
}

impl Profile {
    /// Returns the operations by name, sorted by their own time, longest first.
    #[must_use]
    pub fn operations(&self) -> Vec<OperationSummary> {
        summary::summarize(&self.events)
    }

    /// Returns the first `rows` of [`Profile::operations`] as a table to print.
    #[must_use]
    pub fn table(&self, rows: usize) -> Table {
        Table::new(self.operations(), rows)
    }
}

/// Records what the body does on this rank.
pub(crate) fn profile<R>(
    processes: &Processes,
    options: ProfileOptions,
    body: impl FnOnce(&mut Profiler) -> Result<R>,
) -> Result<(R, Profile)> {
    if options.schedule.is_some_and(|schedule| schedule.active == 0) {
        return Err(Error::invalid_argument(
            "profile: the schedule has no active steps, so nothing would be recorded; set `active`",
        ));
    }
    let recorded = ProfilerOptions {
        cuda: processes.device().has_streams(),
        shapes: options.shapes || options.flops,
        memory: options.memory,
        flops: options.flops,
    };
    let mut profiler = Profiler {
        options,
        recorded,
        rank: processes.process_index(),
        step: 0,
        state: State::Idle,
        scope: None,
        profile: Profile::default(),
    };
    profiler.begin_step()?;
    let result = body(&mut profiler)?;
    profiler.scope = None;
    if matches!(profiler.state, State::Record(_)) {
        profiler.save()?;
    }
    Ok((result, profiler.profile))
}

impl Profiler {
    /// Marks the end of a step of the loop, and begins the next.
    ///
    /// # Errors
    /// Returns the same errors as [`crate::Accelerator::profile`].
    pub fn step(&mut self) -> Result<()> {
        self.scope = None;
        if self.phase() == Phase::RecordAndSave {
            self.save()?;
        }
        self.step += 1;
        self.begin_step()
    }

    fn phase(&self) -> Phase {
        self.options.schedule.map_or(Phase::Record, |schedule| schedule.phase(self.step))
    }

    fn begin_step(&mut self) -> Result<()> {
        let state = std::mem::replace(&mut self.state, State::Idle);
        self.state = match (self.phase(), state) {
            (Phase::Idle, _) => State::Idle,
            (Phase::WarmUp, State::WarmUp(recording)) => State::WarmUp(recording),
            (Phase::WarmUp, _) => State::WarmUp(Recording::start(self.recorded)?),
            (_, State::Record(recording)) => State::Record(recording),
            (_, before) => {
                // A recording that was a warm-up is discarded.
                drop(before);
                State::Record(Recording::start(self.recorded)?)
            }
        };
        if !matches!(self.state, State::Idle) {
            self.scope = Some(Scope::enter(&format!("ProfilerStep#{}", self.step))?);
        }
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        let State::Record(recording) = std::mem::replace(&mut self.state, State::Idle) else {
            return Ok(());
        };
        let Some(folder) = &self.options.trace_dir else {
            self.profile.events.extend(recording.finish(None)?);
            return Ok(());
        };
        let failed = |path: &PathBuf, source| TrainError::File {
            action: "write the trace",
            path: path.clone(),
            source,
        };
        std::fs::create_dir_all(folder).map_err(|source| failed(folder, source))?;
        let name = match self.profile.traces.len() {
            0 => format!("trace_rank{}.json", self.rank),
            cycles => format!("trace_rank{}.{}.json", self.rank, cycles + 1),
        };
        let path = folder.join(name);
        // libtorch does not report an error if it cannot write, so an old file must not remain.
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed(&path, source).into());
            }
            _ => {}
        }
        self.profile.events.extend(recording.finish(Some(&path.to_string_lossy()))?);
        std::fs::metadata(&path).map_err(|source| failed(&path, source))?;
        self.profile.traces.push(path);
        Ok(())
    }
}

impl fmt::Debug for Profiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiler")
            .field("options", &self.options)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_their_phases() {
        let schedule = ProfileSchedule { skip_first: 2, wait: 1, warmup: 1, active: 2, repeat: 2 };
        let letters: String = (0..12)
            .map(|step| match schedule.phase(step) {
                Phase::Idle => '.',
                Phase::WarmUp => 'w',
                Phase::Record => 'r',
                Phase::RecordAndSave => 's',
            })
            .collect();
        assert_eq!(letters, "...wrs.wrs..");
        let single = ProfileSchedule { skip_first: 0, wait: 0, warmup: 0, active: 1, repeat: 0 };
        assert!((0..5).all(|step| single.phase(step) == Phase::RecordAndSave));
    }
}
