//! What can go wrong with an optimizer.

use crate::state::StateMismatch;

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A kernel of libtorch failed.
    #[error(transparent)]
    Torch(#[from] brigade_torch::Error),
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] tch::TchError),
    /// An argument is out of range, a pattern matches nothing, or a group does not exist.
    #[error("{0}")]
    InvalidArgument(String),
    /// A state does not fit the optimizer. Nothing was changed.
    #[error(transparent)]
    State(#[from] StateMismatch),
    /// A schedule's numbers are out of range.
    #[error(transparent)]
    Schedule(#[from] brigade_schedule::ScheduleError),
    /// A file of PyTorch cannot be read.
    #[error(transparent)]
    File(#[from] brigade_checkpoint::Error),
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;
