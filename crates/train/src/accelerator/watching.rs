//! A run's output: terminal, log, progress, rates, profiles and trackers.

use std::fmt;

use brigade_torch::Result;
use brigade_track::Value;

use super::Accelerator;
use crate::watch::log::Logging;
use crate::watch::profile::{self, Profile, ProfileOptions, Profiler};
use crate::watch::progress::Progress;
use crate::watch::tracking::Trackers;

impl Accelerator {
    /// Prints a line on the first process of each host, without mixing with other ranks' lines.
    pub fn println(&self, line: impl fmt::Display) {
        if self.processes.is_local_main_process() {
            self.watch.print(format_args!("{line}\n"));
        }
    }

    /// Prints a text as [`Accelerator::println`] does, without the end of line.
    pub fn print(&self, text: impl fmt::Display) {
        if self.processes.is_local_main_process() {
            self.watch.print(format_args!("{text}"));
        }
    }

    /// Shows the progress of the iterations over `items`, on rank 0 only and on standard error: a bar on a terminal,
    /// below those of the enclosing loops; elsewhere a plain line at intervals of 10 s, which grow to a tenth of the
    /// elapsed time and at most 5 minutes. A loop that is shorter than an interval prints no line.
    ///
    /// Under `brigade launch` all ranks report to the launcher instead, at most five times a second and without waiting
    /// for it. The launcher shows one line for all of them, for the innermost loop, with the slowest rank and the total
    /// throughput.
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
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn progress<I: IntoIterator>(&self, items: I) -> Progress<I::IntoIter> {
        Progress::new(&self.watch, items)
    }

    /// Profiles the body on this rank: the operations of this thread and of its backward, and with CUDA the kernels.
    /// Returns the body's result and the profile.
    ///
    /// The body calls [`Profiler::step`] after each step; without a schedule that only marks them.
    ///
    /// ```
    /// # use brigade_train::{Accelerator, ProfileOptions, ProfileSchedule};
    /// # use tch::Tensor;
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
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the error of the body; [`brigade_torch::ErrorKind::InvalidArgument`] for a schedule without active
    /// steps; [`crate::TrainError::File`] when a trace cannot be written; [`brigade_torch::ErrorKind::Tensor`] when
    /// this thread is being recorded already.
    pub fn profile<R>(
        &self,
        options: ProfileOptions,
        body: impl FnOnce(&mut Profiler) -> Result<R>,
    ) -> Result<(R, Profile)> {
        profile::profile(&self.processes, options, body)
    }

    /// Returns the log of the run, whose lines contain the rank and the step.
    #[must_use]
    pub fn logging(&self) -> Logging<'_> {
        Logging { watch: &self.watch, processes: &self.processes }
    }

    /// Returns the trackers, for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn trackers(&self) -> &Trackers {
        &self.watch.trackers
    }

    /// Logs values to all trackers, on rank 0; on other ranks it does nothing. Values keep their order. Log lines show
    /// this step from now on, too.
    ///
    /// Values of one type can be passed directly; for several types use [`Value`](brigade_track::Value):
    ///
    /// ```
    /// # use brigade_train::Accelerator;
    /// use brigade_track::Value;
    /// # let folder = std::env::temp_dir().join(format!("brigade-log-{}", std::process::id()));
    /// # let accelerator = Accelerator::builder().logging_dir(&folder).build()?;
    /// # accelerator.trackers().start("fashion", &())?;
    /// accelerator.log([("loss", Value::from(0.5)), ("stage", Value::from("warm"))], 10)?;
    /// accelerator.log([("note", "no step")], None)?;
    /// # accelerator.trackers().finish()?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
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
        self.watch.trackers.log(values, step)
    }
}
