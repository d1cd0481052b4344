//! The Learner and its losses against fastai's numbers, on one rank and on two.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod cpu;
#[path = "../common/fill.rs"]
mod fill;
