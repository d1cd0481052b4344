//! Where the programs are, and how to run them to their end.

#[path = "../../../launcher.rs"]
mod launcher;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::LazyLock;

/// The example, built for this test by cargo.
pub(crate) const EXAMPLE: &str = env!("CARGO_BIN_EXE_fashion_mnist");
/// The example without anything distributed.
#[allow(dead_code)] // not every kind of tests starts it
pub(crate) const SINGLE: &str = env!("CARGO_BIN_EXE_fashion_mnist_single");

/// The binary `brigade`, built once for each test program.
pub(crate) fn brigade() -> PathBuf {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| launcher::brigade_beside(EXAMPLE));
    PROGRAM.clone()
}

/// Runs a command, prints what it said when it failed, and gives its standard output.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = run(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?} ended with {}\n--- stdout\n{text}\n--- stderr\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"))
}

/// The accuracies that the main process printed, in percent, by epoch.
pub(crate) fn accuracies(stdout: &str) -> Vec<f64> {
    stdout
        .lines()
        .filter_map(|line| line.split_once("accuracy = "))
        .map(|(_, percent)| percent.trim().parse().expect("a number after `accuracy =`"))
        .collect()
}
