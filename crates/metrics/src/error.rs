//! What can go wrong in a metric.

/// What fallible functions of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of a metric.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A metric could not be computed, or panicked.
    #[error("the metric `{metric}` failed: {reason}")]
    Metric {
        /// Its name.
        metric: String,
        /// Its error, or the text of its panic.
        reason: String,
    },
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    InvalidArgument(String),
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] tch::TchError),
    /// A collective failed: another rank is gone, for example.
    #[error(transparent)]
    Torch(#[from] brigade_torch::Error),
    /// An error of the program's own metric.
    #[error(transparent)]
    User(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps an error of the program's own.
    pub fn user(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::User(error.into())
    }
}
