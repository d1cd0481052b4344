//! Learners of texts against fastai's numbers, and on ranks.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod cpu;
#[path = "../../../learn/tests/common/fill.rs"]
#[allow(dead_code, reason = "the tests of brigade-learn use the rest of it")]
mod fill;
