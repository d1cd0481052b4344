//! Error of functions for GPUs made of host memory.

/// Error of a function for GPUs made of host memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FakeError {
    pub(crate) message: String,
}
