//! The error of functions for GPUs made of host memory.

/// Says why a function of GPUs made of host memory failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FakeError {
    pub(crate) message: String,
}
