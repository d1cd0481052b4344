//! Trainings on a TPU, or on what TorchTPU's plug-in has instead, against the same ones on the CPU.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests
#![allow(clippy::print_stdout)] // what was measured

mod checkpoints;
mod device;
mod group;
mod models;
mod operations;
mod optimizers;
mod ranks;
mod speed;
mod training;

brigade_test_needs::main!();
