//! The trackers of a run: rank 0 alone writes.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use brigade_torch::{Error, Result};
use brigade_track::{Config, Image, Outcome, Run, Stamp, Table, Tracker, Value, Values};
use parking_lot::Mutex;
use serde::Serialize;

use crate::error::TrainError;
use crate::processes::Processes;

/// The trackers of a run: every rank calls the methods, rank 0 writes. An Accelerator contains one; a program without
/// an Accelerator can use it on its own.
///
/// ```
/// use brigade_track::JsonLines;
/// use brigade_train::{ConnectOptions, Processes, Trackers};
///
/// # let folder = std::env::temp_dir().join(format!("brigade-trackers-{}", std::process::id()));
/// let processes = Processes::join(ConnectOptions { cpu: true, ..Default::default() })?;
/// let trackers = Trackers::new(&processes, vec![Box::new(JsonLines::new(&folder))]);
/// trackers.start("digits", &())?;
/// trackers.log([("loss", 0.5)], 10)?;
/// trackers.finish()?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct Trackers {
    processes: Processes,
    state: Mutex<State>,
    /// Number of the last logged step, plus one. 0 before the first.
    step: AtomicU64,
}

struct State {
    trackers: Vec<Box<dyn Tracker>>,
    started: bool,
}

impl Trackers {
    /// Makes the trackers of a run, which begins with [`Trackers::start`].
    #[must_use]
    pub fn new(processes: &Processes, trackers: Vec<Box<dyn Tracker>>) -> Self {
        let state = Mutex::new(State { trackers, started: false });
        Self { processes: processes.clone(), state, step: AtomicU64::new(0) }
    }

    /// Starts a run of a project, with the run's configuration: any value that serde can serialise, `&()` for none.
    /// Every rank calls it, rank 0 writes.
    ///
    /// ```
    /// # use brigade_train::Accelerator;
    /// # let folder = std::env::temp_dir().join(format!("brigade-init-{}", std::process::id()));
    /// #[derive(serde::Serialize)]
    /// struct Settings {
    ///     lr: f64,
    ///     epochs: u32,
    /// }
    ///
    /// let accelerator = Accelerator::builder().logging_dir(&folder).build()?;
    /// accelerator.trackers().start("fashion", &Settings { lr: 5e-3, epochs: 4 })?;
    /// accelerator.log([("loss", 0.5), ("accuracy", 0.9)], 10)?;
    /// accelerator.trackers().finish()?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails on every rank: [`crate::TrainError::Track`] for a folder that cannot be written or a server that does not
    /// answer ([`crate::TrainError::Leader`] on the other ranks); [`brigade_torch::ErrorKind::InvalidArgument`] when a
    /// run has begun.
    pub fn start(&self, project: &str, config: &impl Serialize) -> Result<()> {
        if self.state.lock().started {
            return Err(Error::invalid_argument(
                "the trackers are started: a run has one project; end it before the next (Trackers::finish)",
            ));
        }
        self.processes.on_main_process(|| {
            let run = Run::new(project).config(Config::of(config)?);
            let mut state = self.state.lock();
            let trackers = &mut state.trackers;
            for place in 0..trackers.len() {
                if let Err(error) = trackers[place].start(&run) {
                    for started in &mut trackers[..place] {
                        let _ = started.finish(Outcome::Failed);
                    }
                    return Err(TrainError::Track(error));
                }
            }
            Ok(())
        })?;
        self.state.lock().started = true;
        Ok(())
    }

    /// Returns `true` if the run has begun and has not ended.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.state.lock().started
    }

    /// Logs values to all trackers, on rank 0; on other ranks it does nothing. Values keep their order.
    ///
    /// # Errors
    /// [`crate::TrainError::Track`] when a tracker cannot write, after all have been given the values;
    /// [`brigade_torch::ErrorKind::InvalidArgument`] before [`Trackers::start`].
    pub fn log<N, V>(
        &self,
        values: impl IntoIterator<Item = (N, V)>,
        step: impl Into<Option<u64>>,
    ) -> Result<()>
    where
        N: Into<String>,
        V: Into<Value>,
    {
        let at = Stamp { step: step.into(), time: SystemTime::now() };
        if let Some(step) = at.step {
            self.set_step(step);
        }
        let mut state = self.state.lock();
        if !state.started {
            return Err(Error::invalid_argument(
                "log was called before Trackers::start: start the trackers first, on every rank",
            ));
        }
        if !self.processes.is_main_process() {
            return Ok(());
        }
        let values: Values =
            values.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        each(&mut state.trackers, |tracker| tracker.log(&values, at))
    }

    /// Returns one of the trackers, by name: `jsonl`, `csv`, `tensorboard`, `mlflow`, or the name of a custom tracker.
    /// On ranks other than 0 its methods accept everything and write nothing.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when there is none of that name.
    pub fn tracker(&self, name: &str) -> Result<TrackerHandle<'_>> {
        let state = self.state.lock();
        let Some(place) = state.trackers.iter().position(|tracker| tracker.name() == name) else {
            let names: Vec<&str> = state.trackers.iter().map(|tracker| tracker.name()).collect();
            return Err(Error::invalid_argument(format!(
                "there is no tracker {name:?}; there are: {}",
                names.join(", ")
            )));
        };
        Ok(TrackerHandle { trackers: self, place, silent: !self.processes.is_main_process() })
    }

    /// Ends the run: everything is written when this returns. Every rank calls it, and waits for rank 0. If no run has
    /// begun it does nothing.
    ///
    /// # Errors
    /// [`crate::TrainError::Track`] when the last values could not be written, [`crate::TrainError::Leader`] on the
    /// other ranks.
    pub fn finish(&self) -> Result<()> {
        if !std::mem::take(&mut self.state.lock().started) {
            return Ok(());
        }
        self.processes.on_main_process(|| {
            each(&mut self.state.lock().trackers, |tracker| tracker.finish(Outcome::Finished))
        })?;
        Ok(())
    }

    /// Returns the number of the last logged step.
    pub(crate) fn step(&self) -> Option<u64> {
        self.step.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Sets the step that log lines show, for programs that log nothing to the trackers.
    pub fn set_step(&self, step: u64) {
        self.step.store(step.saturating_add(1), Ordering::Relaxed);
    }
}

impl fmt::Debug for Trackers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        let names: Vec<&str> = state.trackers.iter().map(|tracker| tracker.name()).collect();
        f.debug_struct("Trackers").field("trackers", &names).finish_non_exhaustive()
    }
}

/// A single tracker of a run. Made by [`Trackers::tracker`].
#[derive(Debug)]
pub struct TrackerHandle<'a> {
    trackers: &'a Trackers,
    place: usize,
    silent: bool,
}

impl TrackerHandle<'_> {
    /// Logs values to this tracker only.
    ///
    /// # Errors
    /// [`crate::TrainError::Track`] when it cannot write.
    pub fn log(&self, values: &[(String, Value)], step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log(values, at))
    }

    /// Logs a text to this tracker.
    ///
    /// # Errors
    /// [`crate::TrainError::Track`] if the tracker cannot write, or does not support texts.
    pub fn log_text(&self, name: &str, text: &str, step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log_text(name, text, at))
    }

    /// Logs an image to this tracker.
    ///
    /// # Errors
    /// [`crate::TrainError::Track`] if the tracker cannot write, or does not support images.
    pub fn log_image(&self, name: &str, image: &Image, step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log_image(name, image, at))
    }

    /// Logs a table to this tracker.
    ///
    /// # Errors
    /// [`crate::TrainError::Track`] if the tracker cannot write, or does not support tables.
    pub fn log_table(&self, name: &str, table: &Table, step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log_table(name, table, at))
    }

    /// Calls `body` with the tracker itself, on rank 0: for methods of a particular type of tracker. Returns `None` on
    /// other ranks, and if the tracker has another type.
    pub fn with<T: Tracker, R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.silent {
            return None;
        }
        let mut state = self.trackers.state.lock();
        let tracker: &mut dyn Any = &mut **state.trackers.get_mut(self.place)?;
        tracker.downcast_mut().map(body)
    }

    fn ask(&self, call: impl FnOnce(&mut dyn Tracker) -> brigade_track::Result<()>) -> Result<()> {
        if self.silent {
            return Ok(());
        }
        match self.trackers.state.lock().trackers.get_mut(self.place) {
            Some(tracker) => Ok(call(&mut **tracker).map_err(TrainError::Track)?),
            None => Ok(()),
        }
    }
}

fn at(step: impl Into<Option<u64>>) -> Stamp {
    Stamp { step: step.into(), time: SystemTime::now() }
}

/// Calls `f` with all trackers, even if one fails, and returns the first error.
fn each(
    trackers: &mut [Box<dyn Tracker>],
    mut call: impl FnMut(&mut dyn Tracker) -> brigade_track::Result<()>,
) -> Result<()> {
    let mut outcome = Ok(());
    for tracker in trackers {
        let called = call(&mut **tracker);
        if outcome.is_ok() {
            outcome = called.map_err(|error| TrainError::Track(error).into());
        }
    }
    outcome
}
