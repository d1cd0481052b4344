//! Hosts in namespaces, and file systems that do not answer.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // clippy knows only functions marked as tests

mod hosts;

brigade_test_needs::main!();
