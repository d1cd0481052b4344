//! What can go wrong in the Learner.

use std::path::PathBuf;

use brigade_plot::PlotError;
use brigade_torch::{Error, ErrorKind};

use crate::callback::Level;
use crate::event::Event;

/// What failed in the Learner: the detail of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// A callback's own error.
    #[error("{callback} failed at {event}: {source}")]
    Callback {
        /// The callback's name.
        callback: String,
        /// The event.
        event: Event,
        /// Its error.
        source: Error,
    },
    /// A callback cancelled something that was not running.
    #[error(
        "{callback} cancelled the {level} at {event}, where no {level} runs; cancel what runs there, or at \
         another event"
    )]
    Cancel {
        /// The callback's name.
        callback: String,
        /// What it cancelled.
        level: Level,
        /// Where.
        event: Event,
    },
    /// A file could not be read or written.
    #[error("{action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file is not what this crate writes, or was written by another version or for another model.
    #[error("{} cannot be loaded: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The first thing that does not fit.
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
