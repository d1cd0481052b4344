//! Values of metrics, and their states over batches and ranks.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../../../learn/tests/common/fill.rs"]
mod fill;
mod fold;
mod metrics;
mod ranks;
