//! Tests of trackers with the real MLflow and TensorBoard.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod mlflow;
mod tensorboard;

brigade_test_needs::main!();
