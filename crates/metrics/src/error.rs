//! Errors of metrics.

use brigade_torch::{Error, ErrorKind, is_out_of_memory_message};

/// A metric that failed or panicked: the detail of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[error("the metric `{metric}` failed: {reason}")]
#[non_exhaustive]
pub struct MetricError {
    /// Name of the metric.
    pub metric: String,
    /// Error message, or the text of the panic.
    pub reason: String,
}

impl From<MetricError> for Error {
    fn from(error: MetricError) -> Self {
        let memory = is_out_of_memory_message(&error.reason);
        let kind = if memory { ErrorKind::OutOfMemory } else { ErrorKind::Metric };
        Self::new(kind, error)
    }
}
