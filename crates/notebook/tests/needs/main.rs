//! Notebooks with the real kernel.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

#[path = "../../../../examples/launcher.rs"]
mod binary;
mod jupyter;

brigade_test_needs::main!();
