//! Data sets of images, and transforms of their batches.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod augment;
mod cache;
mod dataset;
mod pack;
#[path = "../common/pictures.rs"]
mod pictures;
mod segmentation;
