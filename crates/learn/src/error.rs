//! What can go wrong in the Learner.

use std::path::PathBuf;

use crate::callback::Level;
use crate::event::Event;

/// What fallible functions of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of the Learner.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The Accelerator, a loader, the model, an optimizer or a metric failed.
    #[error(transparent)]
    Train(#[from] brigade_train::Error),
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] tch::TchError),
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    InvalidArgument(String),
    /// An invariant of Brigade does not hold: a defect of the library, not of the program.
    #[error("internal error: {0}; this is a defect in Brigade: please report it with this line")]
    Internal(String),
    /// A schedule's numbers are out of range.
    #[error(transparent)]
    Schedule(#[from] brigade_schedule::ScheduleError),
    /// Images could not be found, read or transformed.
    #[error(transparent)]
    Vision(#[from] brigade_vision::VisionError),
    /// A callback's own error.
    #[error("{callback} failed at {event}: {source}")]
    Callback {
        /// The callback's name.
        callback: String,
        /// The event.
        event: Event,
        /// Its error.
        source: Box<Self>,
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
    /// An error of the program's own callback or data set.
    #[error(transparent)]
    User(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps an error of the program's own.
    pub fn user(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::User(error.into())
    }

    /// Joins a file with the error that concerns it.
    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}

macro_rules! through_train {
    ($($error:ty),+) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::Train(error.into())
            }
        })+
    };
}

through_train!(
    brigade_torch::Error,
    brigade_data::DataError,
    brigade_metrics::Error,
    brigade_nn::Error,
    brigade_optim::Error,
    brigade_track::TrackError
);
