//! A run's output: terminal, log, progress, rates, profiles and trackers.

use std::fmt;
use std::time::Instant;

use brigade_track::Value;
use serde::Serialize;

use super::Accelerator;
use crate::error::Result;
use crate::watch::log::{LogLayer, LogOptions, Logger};
use crate::watch::meter::Meter;
use crate::watch::profile::{self, Profile, ProfileOptions, Profiler};
use crate::watch::progress::Progress;
use crate::watch::tracking::{TrackerHandle, Trackers};

impl Accelerator {
    /// Prints a line on the first process of each host, without mixing with other ranks' lines.
    pub fn println(&self, line: impl fmt::Display) {
        if self.is_local_main_process() {
            self.watch.print(format_args!("{line}\n"));
        }
    }

    /// As [`Accelerator::println`], without the end of line.
    pub fn print(&self, text: impl fmt::Display) {
        if self.is_local_main_process() {
            self.watch.print(format_args!("{text}"));
        }
    }

    /// Writes what this process logs, from this call on: its own lines and those of all crates that use
    /// `tracing`. A line has the time, the level, the rank, and the step that
    /// [`Accelerator::log`] or [`Accelerator::set_step`] gave last:
    ///
    /// ```text
    /// 2026-11-21T20:35:46.250Z INFO rank=0 step=12 train: loss is 0.5
    /// ```
    ///
    /// It is `tracing`'s subscriber of the whole process. A program that has one adds
    /// [`Accelerator::log_layer`] to it instead.
    ///
    /// # Errors
    /// [`crate::Error::File`] when the file cannot be opened; [`crate::Error::InvalidArgument`] when the process has a
    /// subscriber.
    pub fn init_logging(&self, options: &LogOptions) -> Result<()> {
        self.log_layer(options)?.install()
    }

    /// What [`Accelerator::init_logging`] installs, for a program that puts its own subscriber together.
    ///
    /// # Errors
    /// [`crate::Error::File`] when the file cannot be opened.
    pub fn log_layer(&self, options: &LogOptions) -> Result<LogLayer> {
        LogLayer::new(&self.watch, options)
    }

    /// A logger of this name. Its lines come from rank 0 unless [`Logger::everywhere`] or
    /// [`Logger::in_order`] is asked for.
    ///
    /// ```
    /// # let accelerator = brigade_train::Accelerator::builder().cpu(true).build()?;
    /// let log = accelerator.logger("train");
    /// log.info("written once, by rank 0");
    /// log.everywhere().warn("written by every rank");
    /// log.in_order(|log| log.info("written by every rank, in order"))?;
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    #[must_use]
    pub fn logger(&self, name: impl Into<String>) -> Logger {
        Logger::new(name.into(), &self.processes)
    }

    /// The step that log lines name from now on. [`Accelerator::log`] sets it, too.
    pub fn set_step(&self, step: u64) {
        self.watch.trackers.set_step(step);
    }

    /// Shows how far the iterations over `items` are, on rank 0 only and on standard error: a bar on a
    /// terminal, below those of the loops around it; else a plain line now and then (10 s after the one
    /// before, later a tenth of the run so far, at most 5 minutes), and none for a loop that is over
    /// soon.
    ///
    /// Under `brigade launch` all ranks tell the launcher instead, at most five times a second and
    /// without waiting for it. It shows one line for all of them, of the innermost loop, with the slowest
    /// rank and the throughput of all.
    ///
    /// [`Accelerator::println`] and log lines do not tear the bar.
    ///
    /// ```
    /// # let accelerator = brigade_train::Accelerator::builder().cpu(true).build()?;
    /// let bar = accelerator.progress(1..100).label("epoch 3");
    /// let values = bar.values();
    /// for batch in bar {
    ///     let loss = 1.0 / f64::from(batch);
    ///     values.set("loss", loss);
    /// }
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    pub fn progress<I: IntoIterator>(&self, items: I) -> Progress<I::IntoIter> {
        Progress::new(&self.watch, items)
    }

    /// A meter over the last `window` steps, at least one, that begins now.
    #[must_use]
    pub fn meter(&self, window: usize) -> Meter {
        Meter::starting_at(Instant::now(), window, self.num_processes(), self.device())
    }

    /// Records what the body does on this rank: the operations of this thread and of its backward, and
    /// with CUDA the kernels. Gives the body's result and the recording.
    ///
    /// The body calls [`Profiler::step`] after each step; without a schedule that only marks them.
    ///
    /// ```
    /// # use brigade_train::{Accelerator, ProfileOptions, ProfileSchedule, Tensor};
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let folder = std::env::temp_dir().join(format!("brigade-profile-{}", std::process::id()));
    /// # let train_step = || Tensor::ones([64, 64], (tch::Kind::Float, tch::Device::Cpu)).f_square();
    /// let options = ProfileOptions {
    ///     trace_dir: Some(folder.clone()),
    ///     schedule: Some(ProfileSchedule::default()),
    ///     ..ProfileOptions::default()
    /// };
    /// let ((), profile) = accelerator.profile(options, |profiler| {
    ///     for _ in 0..5 {
    ///         train_step()?;
    ///         profiler.step()?;
    ///     }
    ///     Ok(())
    /// })?;
    /// accelerator.println(profile.table(10));
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// The body's; [`crate::Error::InvalidArgument`] for a schedule without active steps; [`crate::Error::File`] when a trace
    /// cannot be written; [`crate::Error::Torch`] when this thread is being recorded already.
    pub fn profile<R>(
        &self,
        options: ProfileOptions,
        body: impl FnOnce(&mut Profiler) -> Result<R>,
    ) -> Result<(R, Profile)> {
        profile::profile(&self.processes, options, body)
    }

    /// Returns the trackers as a value of their own: for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn trackers(&self) -> &Trackers {
        &self.watch.trackers
    }

    /// Starts the trackers, with the run's settings: anything that serde can serialise, `&()` for none.
    /// Every rank calls it, rank 0 writes; all ranks hear of a failure.
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
    /// accelerator.init_trackers("fashion", &Settings { lr: 5e-3, epochs: 4 })?;
    /// accelerator.log([("loss", 0.5), ("accuracy", 0.9)], 10)?;
    /// accelerator.end_training()?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Track`] for a folder that cannot be written or a server that does not answer,
    /// [`crate::Error::Leader`] on the other ranks; [`crate::Error::InvalidArgument`] when they have been started.
    pub fn init_trackers(&self, project: &str, config: &impl Serialize) -> Result<()> {
        self.watch.trackers.start(project, config)
    }

    /// Gives values to all trackers, on rank 0; elsewhere it does nothing. Values keep their order. The
    /// step is that of log lines from now on, too.
    ///
    /// Values of one kind go in as they are; for several kinds use
    /// [`Value`](brigade_track::Value):
    ///
    /// ```
    /// # use brigade_train::Accelerator;
    /// use brigade_train::track::Value;
    /// # let folder = std::env::temp_dir().join(format!("brigade-log-{}", std::process::id()));
    /// # let accelerator = Accelerator::builder().logging_dir(&folder).build()?;
    /// # accelerator.init_trackers("fashion", &())?;
    /// accelerator.log([("loss", Value::from(0.5)), ("stage", Value::from("warm"))], 10)?;
    /// accelerator.log([("note", "no step")], None)?;
    /// # accelerator.end_training()?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Track`] when a tracker cannot write, after all have been given the values;
    /// [`crate::Error::InvalidArgument`] before [`Accelerator::init_trackers`].
    pub fn log<N, V>(
        &self,
        values: impl IntoIterator<Item = (N, V)>,
        step: impl Into<Option<u64>>,
    ) -> Result<()>
    where
        N: Into<String>,
        V: Into<Value>,
    {
        self.watch.trackers.log(values, step)
    }

    /// Returns one of the trackers, by name: `jsonl`, `csv`, `tensorboard`, `mlflow`, or that of a tracker of the
    /// program's own. On other ranks than 0 it takes everything and writes nothing.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] when there is none of that name.
    pub fn tracker(&self, name: &str) -> Result<TrackerHandle<'_>> {
        self.watch.trackers.tracker(name)
    }

    /// Ends the trackers' run: everything is written when this returns. Every rank calls it, and waits
    /// for rank 0. Without trackers that were started it does nothing.
    ///
    /// # Errors
    /// [`crate::Error::Track`] when the last values could not be written, [`crate::Error::Leader`] on the other ranks.
    pub fn end_training(&self) -> Result<()> {
        self.watch.trackers.finish()
    }
}
