//! Tests that need Python.

#![expect(clippy::unwrap_used, reason = "a fixture that cannot be set fails its test")]

mod gpu;
mod semver;
mod setup;

brigade_test_needs::main!();
