//! Tests of damaged weights files and of those of other packages, and of the memory that models take.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod hostile_weights;
mod quantized_files;
mod quantized_memory;
mod recompute_memory;
mod status;
mod weights_memory;
