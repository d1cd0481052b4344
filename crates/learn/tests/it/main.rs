//! Data blocks, and what a Learner does. No number here depends on how a processor rounds.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod data_block;
#[path = "../common/fill.rs"]
#[allow(dead_code, reason = "the tests of numbers use the rest of it")]
mod fill;
mod learner;
#[path = "../common/learner.rs"]
#[allow(dead_code, reason = "the tests of numbers use the rest of it")]
mod setup;
