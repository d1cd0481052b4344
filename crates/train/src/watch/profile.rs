//! What a training loop spends its time on.

mod summary;

use std::fmt;
use std::path::PathBuf;

use brigade_torch::{DeviceExt, Error, ProfiledEvent, ProfilerOptions, Recording, Result, Scope};

pub use summary::{OperationSummary, Table};

use crate::error::TrainError;
use crate::processes::Processes;

/// What [`crate::Accelerator::profile`] records.
#[derive(Debug, Clone, Default)]
pub struct ProfileOptions {
    /// Where each rank writes `trace_rankN.json`, which `chrome://tracing` and
    /// [Perfetto](https://ui.perfetto.dev) show; further cycles of the schedule are
    /// `trace_rankN.2.json` and so on. `None` writes no file.
    pub trace_dir: Option<PathBuf>,
    /// Which steps are recorded; `None` is all.
    pub schedule: Option<ProfileSchedule>,
    /// The shapes of the operations' inputs.
    pub shapes: bool,
    /// What is allocated and freed.
    pub memory: bool,
    /// Floating-point operations of those whose formula libtorch knows (matrix products,
    /// convolutions); needs `shapes`.
    pub flops: bool,
}

/// Which steps are recorded, as `torch.profiler.schedule`: first `skip_first` are left out, then in turn
/// `wait` are, `warmup` are recorded and thrown away (the profiler's first steps are slower), and
/// `active` are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileSchedule {
    /// Steps left out at the start, once.
    pub skip_first: usize,
    /// Steps left out in each cycle.
    pub wait: usize,
    /// Steps recorded for nothing.
    pub warmup: usize,
    /// Steps kept; at least 1.
    pub active: usize,
    /// Cycles; 0 goes on to the end.
    pub repeat: usize,
}

impl Default for ProfileSchedule {
    fn default() -> Self {
        Self { skip_first: 0, wait: 1, warmup: 1, active: 3, repeat: 1 }
    }
}

/// What happens in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    WarmUp,
    Record,
    /// The last step of a cycle.
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

/// Handed to the body of [`crate::Accelerator::profile`], to mark each step.
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

/// What was recorded on this rank.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// All events of all cycles.
    pub events: Vec<ProfiledEvent>,
    /// The files written, one for each cycle.
    pub traces: Vec<PathBuf>,
}

impl Profile {
    /// Operations by name, the one with the most time of its own first.
    #[must_use]
    pub fn operations(&self) -> Vec<OperationSummary> {
        summary::summarize(&self.events)
    }

    /// The first `rows` of [`Profile::operations`], to print.
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
        cuda: processes.device().device_kind().is_some(),
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
    /// Ends a step of the loop and begins the next.
    ///
    /// # Errors
    /// As [`crate::Accelerator::profile`].
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
                // A recording that was a warm-up ends here, for nothing.
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
        // libtorch says nothing when it cannot write. What stood here is not what it wrote.
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
