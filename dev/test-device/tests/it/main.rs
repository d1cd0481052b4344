//! Tests of GPUs made of host memory, and of the device of other tests.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod border;
mod devices;
mod graphs;
mod numbers;
mod operators;
mod streams;
mod variable;
