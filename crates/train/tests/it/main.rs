//! Tests of the Accelerator around the computation: preparing, checkpoints, errors, what is shown.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod batch_size;
mod checkpoint_faults;
mod checkpoint_kill;
mod checkpoint_versions;
mod checkpoint_worlds;
mod debug;
mod deferred;
mod extending;
mod forward_errors;
mod losses;
#[cfg(not(feature = "cuda"))]
mod memory;
#[path = "../common/net.rs"]
#[allow(dead_code, reason = "the tests of numbers use the rest of it")]
mod net;
mod pipeline_kill;
mod prepare;
mod profile;
#[path = "../common/resume.rs"]
mod resume;
mod scopes;
mod struct_batches;
mod terminal;
mod trainable;
mod watching;
