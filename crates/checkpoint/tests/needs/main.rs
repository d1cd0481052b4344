//! Checkpoints and weights files with PyTorch, and on file systems without direct I/O.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod dcp;
mod formats;
mod pth;
#[path = "../common/saved.rs"]
mod saved;
mod torch_schedulers;
mod uncached;
mod weights_python;

brigade_test_needs::main!();
