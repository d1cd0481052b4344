//! A run, and a point in time of it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{Config, Result, TrackError};

/// Description of a run that a tracker receives at its start.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Run {
    /// Name of the project: the name of the file or folder, or of the experiment on a server.
    pub project: String,
    /// Settings of the run.
    pub config: Config,
    /// Start time of the run.
    pub began: SystemTime,
}

/// Step and time of a logged value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stamp {
    /// Training step, if there is one.
    pub step: Option<u64>,
    /// Wall-clock time of the value.
    pub time: SystemTime,
}

/// Outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The run finished without an error.
    Finished,
    /// The run failed, or was dropped without being finished.
    Failed,
}

impl Run {
    /// Creates a run without settings that begins now.
    #[must_use]
    pub fn new(project: impl Into<String>) -> Self {
        Self { project: project.into(), config: Config::default(), began: SystemTime::now() }
    }

    /// Sets the run's settings.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Returns the project's name if it can be a file name.
    ///
    /// # Errors
    /// [`TrackError::Project`] for a name that is empty, begins with a dot, or contains `/`, a backslash or a NUL.
    pub fn file_name(&self) -> Result<&str> {
        let name = self.project.as_str();
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
            return Err(TrackError::Project { project: name.to_owned() });
        }
        Ok(name)
    }
}

impl Stamp {
    /// Returns a stamp of the current time at this step.
    #[must_use]
    pub fn step(step: u64) -> Self {
        Self { step: Some(step), time: SystemTime::now() }
    }

    /// Returns a stamp of the current time without a step.
    #[must_use]
    pub fn now() -> Self {
        Self { step: None, time: SystemTime::now() }
    }

    /// Returns the time in seconds since 1970, rounded down to microseconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        seconds(self.time)
    }
}

/// Seconds since 1970; an earlier time counts as 0.
pub(crate) fn seconds(time: SystemTime) -> f64 {
    since_1970(time).as_micros() as f64 / 1e6
}

pub(crate) fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}
