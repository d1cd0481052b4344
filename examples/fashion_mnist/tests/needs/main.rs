//! The programs of this example with PyTorch, and under schedulers.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

#[allow(dead_code)] // it serves other tests, too
#[path = "../../../../crates/cli/tests/needs/cluster.rs"]
mod cluster;
#[path = "../common/programs.rs"]
mod programs;
mod python;
mod schedulers;

brigade_test_needs::main!();
