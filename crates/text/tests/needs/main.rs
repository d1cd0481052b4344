//! Batches beside those of transformers.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod transformers;

brigade_test_needs::main!();
