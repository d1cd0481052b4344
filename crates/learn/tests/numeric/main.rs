//! The Learner and its losses against fastai's numbers, on one rank and on two.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod cpu;
#[path = "../common/fill.rs"]
mod fill;
#[path = "../common/learner.rs"]
#[allow(dead_code, reason = "the other tests use the rest of it")]
mod setup;
