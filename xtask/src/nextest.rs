//! Interface to cargo-nextest, which runs each test in a process of its own.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;

/// cargo-nextest, in at least the version that `.config/nextest.toml` needs.
///
/// A test program contains the tests of a whole package, which change the state of their process (random generators,
/// numbers of threads, environment variables): only with one process per test are they independent.
#[derive(Debug)]
pub(crate) struct Nextest {
    program: PathBuf,
}

impl Nextest {
    /// Returns the one in `PATH`, or else the one in the checkout, which cargo compiles if it is missing.
    pub(crate) fn find_or_install(checkout: &Checkout) -> Result<Self> {
        let of_path = PathBuf::from("cargo-nextest");
        if version(&of_path).is_some_and(|it| it >= OLDEST) {
            return Ok(Self { program: of_path });
        }
        cargo::install(checkout, "cargo-nextest", VERSION).map(|program| Self { program })
    }

    /// Returns `cargo nextest` without any libtorch.
    pub(crate) fn plain(&self, checkout: &Checkout) -> Command {
        let mut command = cargo::plain(checkout, &self.program);
        command.arg("nextest");
        command
    }

    /// Returns the command `cargo nextest ARGUMENTS…` with the environment of this cargo.
    pub(crate) fn command(&self, cargo: &Cargo<'_>, arguments: &[&str]) -> Command {
        let mut command = cargo.like(&self.program);
        command.arg("nextest").args(arguments);
        command
    }
}

/// Parses "cargo-nextest 0.9.143 (…)".
fn version(program: &PathBuf) -> Option<[u32; 3]> {
    let output = Command::new(program).args(["nextest", "--version"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    parse(text.split_whitespace().nth(1)?)
}

fn parse(version: &str) -> Option<[u32; 3]> {
    let parts: Option<Vec<u32>> = version.split('.').map(|it| it.parse().ok()).collect();
    parts?.try_into().ok()
}

/// Version that is installed if there is none.
const VERSION: &str = "0.9.143";
/// Oldest version that passes the names of test and program to what it starts.
const OLDEST: [u32; 3] = [0, 9, 116];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(parse("0.9.143") > Some(OLDEST) && parse("0.9.99") < Some(OLDEST));
        assert!(parse("0.10.1") > Some(OLDEST));
        assert_eq!((parse("0.9"), parse("x")), (None, None));
        assert!(parse(VERSION) >= Some(OLDEST));
    }
}
