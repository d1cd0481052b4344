//! What cells show and start, without a kernel.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../../../../examples/launcher.rs"]
mod binary;
mod display;
mod launcher;
#[cfg(feature = "learn")]
mod learner;
