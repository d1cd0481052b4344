//! Learners of texts against fastai's, on ranks, and after they were stopped.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../../learn/tests/common/fill.rs"]
mod fill;
#[path = "learners/golden.rs"]
mod golden;
#[path = "learners/ranks.rs"]
mod ranks;
#[path = "learners/setup.rs"]
mod setup;
