//! The run that is tracked, and a moment in it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{Config, Result, TrackError};

/// What a tracker receives when a run begins.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Run {
    /// The project: the file's or folder's name, or the experiment on a server.
    pub project: String,
    /// The run's settings.
    pub config: Config,
    /// When it began.
    pub began: SystemTime,
}

/// When something was logged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stamp {
    /// The step, where there is one.
    pub step: Option<u64>,
    /// The wall clock.
    pub time: SystemTime,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It came to its end.
    Finished,
    /// It failed, or was not marked as finished.
    Failed,
}

impl Run {
    /// A run without settings that begins now.
    #[must_use]
    pub fn new(project: impl Into<String>) -> Self {
        Self { project: project.into(), config: Config::default(), began: SystemTime::now() }
    }

    /// With these settings.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// The project as the name of a file.
    ///
    /// # Errors
    /// [`TrackError::Project`] for a name that would lie elsewhere, or be hidden.
    pub fn file_name(&self) -> Result<&str> {
        let name = self.project.as_str();
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
            return Err(TrackError::Project { project: name.to_owned() });
        }
        Ok(name)
    }
}

impl Stamp {
    /// Now, at this step.
    #[must_use]
    pub fn step(step: u64) -> Self {
        Self { step: Some(step), time: SystemTime::now() }
    }

    /// Now, at no step.
    #[must_use]
    pub fn now() -> Self {
        Self { step: None, time: SystemTime::now() }
    }

    /// Seconds since 1970, to the microsecond.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        seconds(self.time)
    }
}

/// Seconds since 1970; a clock before that counts as 0.
pub(crate) fn seconds(time: SystemTime) -> f64 {
    since_1970(time).as_micros() as f64 / 1e6
}

pub(crate) fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}
