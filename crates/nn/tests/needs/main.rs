//! Tests that need something of the machine.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod torchscript_python;

brigade_test_needs::main!();
