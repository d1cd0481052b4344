//! What can go wrong in a metric.

use brigade_torch::{Error, ErrorKind, says_out_of_memory};

/// A metric that could not be computed, or panicked: the detail of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[error("the metric `{metric}` failed: {reason}")]
#[non_exhaustive]
pub struct MetricError {
    /// Its name.
    pub metric: String,
    /// Its error, or the text of its panic.
    pub reason: String,
}

impl From<MetricError> for Error {
    fn from(error: MetricError) -> Self {
        let memory = says_out_of_memory(&error.reason);
        let kind = if memory { ErrorKind::OutOfMemory } else { ErrorKind::Metric };
        Self::new(kind, error)
    }
}
