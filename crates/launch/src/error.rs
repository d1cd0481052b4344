//! Why a job was not started.

use std::io;

use brigade_world::WorldError;

use crate::{ProgramError, SchedulerError};

/// Nothing of the user's program has run when one of these is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The number of ranks, or of threads per rank, is not possible.
    #[error("--{option} {value} is not possible: {reason}")]
    OptionOutOfRange {
        /// The option's name.
        option: &'static str,
        /// What was asked for.
        value: usize,
        /// What it should be.
        reason: &'static str,
    },
    /// The program cannot be run.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A scheduler started this launcher in a way that cannot be one job.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The plan describes a world that cannot be; a plan from `resolve` does not.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The system refused something the launcher needs.
    #[error("cannot {action}: {source}")]
    System {
        /// What was refused.
        action: String,
        /// Why.
        source: io::Error,
    },
}

impl LaunchError {
    /// For `map_err`: the action that the system refused.
    pub(crate) fn system<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::System { action, source: source.into() }
    }
}
