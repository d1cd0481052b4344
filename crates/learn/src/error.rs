//! Errors of the Learner.

use std::path::PathBuf;

use brigade_plot::PlotError;
use brigade_torch::{Error, ErrorKind};

use crate::callback::Level;
use crate::event::Event;

/// Errors of the Learner: the detail of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// A callback failed with its own error.
    #[error("{callback} failed at {event}: {source}")]
    Callback {
        /// Name of the callback.
        callback: String,
        /// Event at which it failed.
        event: Event,
        /// Error of the callback.
        source: Error,
    },
    /// A callback cancelled a part of the fit that was not running.
    #[error(
        "{callback} cancelled the {level} at {event}, where no {level} runs; cancel what runs there, or at \
         another event"
    )]
    Cancel {
        /// Name of the callback.
        callback: String,
        /// Part of the fit that it cancelled.
        level: Level,
        /// Event at which it was called.
        event: Event,
    },
    /// A file could not be read or written.
    #[error("{action} {}: {source}", path.display())]
    File {
        /// Operation that failed, as the beginning of a message that ends with the path: `cannot write`.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file was not written by this crate, or was written by another version or for another model.
    #[error("{} cannot be loaded: {reason}", path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// Reason why the file cannot be loaded.
        reason: String,
    },
    /// A picture could not be drawn or written.
    #[error("{0}")]
    Plot(#[from] PlotError),
}

impl LearnError {
    /// Joins a file with the error that concerns it.
    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}

impl From<LearnError> for Error {
    fn from(error: LearnError) -> Self {
        let kind = match &error {
            LearnError::Callback { source, .. } => source.kind(),
            LearnError::Cancel { .. } => ErrorKind::InvalidArgument,
            LearnError::File { .. } | LearnError::Plot(PlotError::File { .. }) => ErrorKind::Io,
            LearnError::Format { .. } => ErrorKind::Checkpoint,
            LearnError::Plot(_) => ErrorKind::InvalidArgument,
        };
        Self::new(kind, error)
    }
}
