//! Finds what would stop a job.

mod facts;
mod sources;

pub use facts::*;
pub use sources::Sources;
