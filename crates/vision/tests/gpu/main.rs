//! Batches of images on a GPU.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod device;
#[path = "../common/pictures.rs"]
#[allow(dead_code, reason = "the tests without a GPU use the rest of it")]
mod pictures;
