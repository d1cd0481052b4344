//! Outcome of one rank's attempt of a batch size.

use std::any::Any;

use brigade_torch::{Result, is_out_of_memory_message};
use serde::{Deserialize, Serialize};

pub(super) const SCOPE: &str = "find_executable_batch_size";

/// Result of a body, or its panic.
pub(super) type Outcome<R> = std::thread::Result<Result<R>>;

/// End of one rank's attempt.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum End {
    Fits,
    OutOfMemory,
    /// The attempt was cut off because another rank had failed.
    Cut,
    Failed(String),
}

impl End {
    pub(super) fn of<R>(outcome: &Outcome<R>) -> Self {
        match outcome {
            Ok(Ok(_)) => Self::Fits,
            Ok(Err(error)) if error.is_out_of_memory() => Self::OutOfMemory,
            Ok(Err(error)) => Self::Failed(error.to_string()),
            Err(panic) => match text_of(panic.as_ref()) {
                text if is_out_of_memory_message(&text) => Self::OutOfMemory,
                text => Self::Failed(format!("panic: {text}")),
            },
        }
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked".to_owned())
}
