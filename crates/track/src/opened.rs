//! State of a tracker between start and finish.

use crate::{Result, TrackError};

/// What a tracker has open while it runs. Every access before `start` and after `finish` is an error with its name.
#[derive(Debug)]
pub(crate) struct Opened<T> {
    tracker: &'static str,
    open: Option<T>,
}

impl<T> Opened<T> {
    /// Creates the state of a tracker that was not started.
    pub(crate) fn none(tracker: &'static str) -> Self {
        Self { tracker, open: None }
    }

    /// Starts the tracker.
    pub(crate) fn set(&mut self, open: T) {
        self.open = Some(open);
    }

    /// Returns what is open, if the tracker runs.
    pub(crate) fn running(&self) -> Option<&T> {
        self.open.as_ref()
    }

    pub(crate) fn get(&mut self) -> Result<&mut T> {
        self.open.as_mut().ok_or_else(|| not_started(self.tracker))
    }

    /// Finishes the tracker: returns what was open.
    pub(crate) fn take(&mut self) -> Result<T> {
        self.open.take().ok_or_else(|| not_started(self.tracker))
    }
}

fn not_started(tracker: &str) -> TrackError {
    TrackError::NotStarted { tracker: tracker.to_owned() }
}
