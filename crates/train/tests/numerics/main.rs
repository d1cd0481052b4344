//! Precision, memory format, clipping, weighted losses, batch sizes: what decides about numbers.

#![allow(clippy::unwrap_used)] // also in what the tests share

mod batch_size;
mod clipping;
#[path = "../device/mod.rs"]
mod device;
mod edges;
mod losses;
mod memory_format;
mod net;
mod precision;
mod scaler;
mod weighted;
