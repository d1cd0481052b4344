//! The Learner on a GPU.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod device;
