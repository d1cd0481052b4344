//! Tests of training on a GPU.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod data_on_gpu;
mod gpu;
mod without_gpu;
