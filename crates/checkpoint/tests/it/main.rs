//! Checkpoints and files of weights, read, written and converted.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod dcp;
mod deepspeed;
mod hostile;
mod layout;
mod like;
mod offload_folder;
mod quantized;
mod reader;
#[path = "../common/saved.rs"]
mod saved;
mod weights;
