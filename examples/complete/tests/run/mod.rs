//! One run of the example to its end.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use std::process::Command;

pub(crate) const EXAMPLE: &str = env!("CARGO_BIN_EXE_complete");

/// What it printed. It must succeed.
pub(crate) fn finish(mut command: Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}
