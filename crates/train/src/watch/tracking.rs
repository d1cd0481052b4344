//! The trackers of a run: rank 0 alone writes.

use std::any::Any;
use std::path::PathBuf;
use std::time::SystemTime;

use brigade_track::{Config, Image, Outcome, Run, Stamp, Table, Tracker, Value, Values};
use serde::Serialize;

use crate::accelerator::{Accelerator, AcceleratorBuilder};
use crate::error::{Error, Result};
use crate::watch::Watch;

impl AcceleratorBuilder {
    /// Adds a tracker; several may be added. Without any it is
    /// [`JsonLines`](brigade_track::JsonLines) in the [logging folder](Self::logging_dir).
    pub fn log_with(mut self, tracker: impl Tracker) -> Self {
        self.watch.trackers.push(Box::new(tracker));
        self
    }

    /// Where the default tracker writes: `runs` unless set.
    pub fn logging_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.watch.logging_dir = Some(folder.into());
        self
    }
}

impl Accelerator {
    /// Starts the trackers, with the run's settings: anything that serde can serialise, `&()` for none.
    /// Every rank calls it, rank 0 writes; all ranks hear of a failure.
    ///
    /// ```no_run
    /// # use brigade_train::Accelerator;
    /// # fn f(accelerator: &Accelerator) -> brigade_train::Result<()> {
    /// #[derive(serde::Serialize)]
    /// struct Settings {
    ///     lr: f64,
    ///     epochs: u32,
    /// }
    ///
    /// accelerator.init_trackers("fashion", &Settings { lr: 5e-3, epochs: 4 })?;
    /// accelerator.log([("loss", 0.5), ("accuracy", 0.9)], 10)?;
    /// accelerator.end_training()
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Track`] for a folder that cannot be written or a server that does not answer,
    /// [`Error::Leader`] on the other ranks; [`Error::InvalidArgument`] when they have been started.
    pub fn init_trackers(&self, project: &str, config: &impl Serialize) -> Result<()> {
        if self.watch.trackers().started {
            return Err(Error::InvalidArgument(
                "init_trackers was called before: a run has one project; end_training ends it"
                    .into(),
            ));
        }
        self.on_main_process(|| {
            let run = Run::new(project).config(Config::of(config)?);
            let mut trackers = self.watch.trackers();
            for place in 0..trackers.all.len() {
                if let Err(error) = trackers.all[place].start(&run) {
                    for started in &mut trackers.all[..place] {
                        let _ = started.finish(Outcome::Failed);
                    }
                    return Err(Error::Track(error));
                }
            }
            Ok(())
        })?;
        self.watch.trackers().started = true;
        Ok(())
    }

    /// Gives values to all trackers, on rank 0; elsewhere it does nothing. Values keep their order. The
    /// step is that of log lines from now on, too.
    ///
    /// Values of one kind go in as they are; for several kinds use
    /// [`Value`](brigade_track::Value):
    ///
    /// ```no_run
    /// # use brigade_train::Accelerator;
    /// use brigade_train::track::Value;
    /// # fn f(accelerator: &Accelerator) -> brigade_train::Result<()> {
    /// accelerator.log([("loss", Value::from(0.5)), ("stage", Value::from("warm"))], 10)?;
    /// accelerator.log([("note", "no step")], None)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Track`] when a tracker cannot write, after all have been given the values;
    /// [`Error::InvalidArgument`] before [`Accelerator::init_trackers`].
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
            self.watch.set_step(step);
        }
        let mut trackers = self.watch.trackers();
        if !trackers.started {
            return Err(Error::InvalidArgument(
                "log was called before init_trackers: call that first, on every rank".into(),
            ));
        }
        if !self.is_main_process() {
            return Ok(());
        }
        let values: Values =
            values.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        each(&mut trackers.all, |tracker| tracker.log(&values, at))
    }

    /// One of the trackers, by name: `jsonl`, `csv`, `tensorboard`, `mlflow`, or that of one's own. On
    /// other ranks than 0 it takes everything and writes nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is none of that name.
    pub fn tracker(&self, name: &str) -> Result<TrackerHandle<'_>> {
        let trackers = self.watch.trackers();
        let Some(place) = trackers.all.iter().position(|tracker| tracker.name() == name) else {
            let names: Vec<&str> = trackers.all.iter().map(|tracker| tracker.name()).collect();
            return Err(Error::InvalidArgument(format!(
                "there is no tracker {name:?}; there are: {}",
                names.join(", ")
            )));
        };
        Ok(TrackerHandle { watch: &self.watch, place, silent: !self.is_main_process() })
    }

    /// Ends the trackers' run: everything is written when this returns. Every rank calls it, and waits
    /// for rank 0. Without trackers that were started it does nothing.
    ///
    /// # Errors
    /// [`Error::Track`] when the last values could not be written, [`Error::Leader`] on the other ranks.
    pub fn end_training(&self) -> Result<()> {
        if !self.watch.trackers().started {
            return Ok(());
        }
        self.watch.trackers().started = false;
        self.on_main_process(|| {
            each(&mut self.watch.trackers().all, |tracker| tracker.finish(Outcome::Finished))
        })?;
        Ok(())
    }
}

/// One tracker of a run. Made by [`Accelerator::tracker`].
#[derive(Debug)]
pub struct TrackerHandle<'a> {
    watch: &'a Watch,
    place: usize,
    silent: bool,
}

impl TrackerHandle<'_> {
    /// Gives values to this tracker alone.
    ///
    /// # Errors
    /// [`Error::Track`] when it cannot write.
    pub fn log(&self, values: &[(String, Value)], step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log(values, at))
    }

    /// Gives it a text.
    ///
    /// # Errors
    /// [`Error::Track`] when it cannot write, or has no place for texts.
    pub fn log_text(&self, name: &str, text: &str, step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log_text(name, text, at))
    }

    /// Gives it a picture.
    ///
    /// # Errors
    /// [`Error::Track`] when it cannot write, or has no place for pictures.
    pub fn log_image(&self, name: &str, image: &Image, step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log_image(name, image, at))
    }

    /// Gives it a table.
    ///
    /// # Errors
    /// [`Error::Track`] when it cannot write, or has no place for tables.
    pub fn log_table(&self, name: &str, table: &Table, step: impl Into<Option<u64>>) -> Result<()> {
        let at = at(step);
        self.ask(|tracker| tracker.log_table(name, table, at))
    }

    /// The tracker itself, on rank 0: for what only a tracker of this type can do. `None` on other ranks,
    /// and where it is of another type.
    pub fn with<T: Tracker, R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.silent {
            return None;
        }
        let mut trackers = self.watch.trackers();
        let tracker: &mut dyn Any = &mut **trackers.all.get_mut(self.place)?;
        tracker.downcast_mut().map(body)
    }

    fn ask(&self, call: impl FnOnce(&mut dyn Tracker) -> brigade_track::Result<()>) -> Result<()> {
        if self.silent {
            return Ok(());
        }
        match self.watch.trackers().all.get_mut(self.place) {
            Some(tracker) => Ok(call(&mut **tracker)?),
            None => Ok(()),
        }
    }
}

fn at(step: impl Into<Option<u64>>) -> Stamp {
    Stamp { step: step.into(), time: SystemTime::now() }
}

/// Asks all of them, whatever one says, and gives the first error.
fn each(
    trackers: &mut [Box<dyn Tracker>],
    mut call: impl FnMut(&mut dyn Tracker) -> brigade_track::Result<()>,
) -> Result<()> {
    let mut outcome = Ok(());
    for tracker in trackers {
        let called = call(&mut **tracker);
        if outcome.is_ok() {
            outcome = called.map_err(Error::Track);
        }
    }
    outcome
}
