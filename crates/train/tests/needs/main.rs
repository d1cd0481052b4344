//! Tests that need something of the machine.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod disks;
#[path = "../common/fsdp2_net.rs"]
mod fsdp2_net;
mod fsdp2_ranks;
mod numeric;
#[path = "../common/resume.rs"]
mod resume;
mod tensor_ranks;
mod torchrun;

brigade_test_needs::main!();
