//! Comparison of decoding with Pillow: with stored results, and with Pillow on this machine.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod decode;

brigade_test_needs::main!();
