//! Data blocks and metrics.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod data_block;
#[path = "../common/fill.rs"]
mod fill;
mod fold;
mod metrics;
