//! Decoding against Pillow, as its files say it, and on this machine.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod decode;

brigade_test_needs::main!();
