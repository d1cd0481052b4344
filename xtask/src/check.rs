//! `cargo xtask check`: all lints, cheapest first, warnings as errors.

use std::env;
use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::tidy;

/// Runs every lint, also after one failed, and names those that failed.
pub(crate) fn run(checkout: &Checkout) -> Result<ExitCode> {
    let cargo = Cargo::new(checkout)?;
    let mut failed = Vec::new();

    if !cargo.run(&["fmt", "--all", "--check"])?.success() {
        failed.push("fmt (run `cargo fmt --all`)");
    }
    if tidy::run(checkout)? != ExitCode::SUCCESS {
        failed.push("tidy");
    }
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    if !cargo.run(&clippy)?.success() {
        failed.push("clippy");
    }
    if !cargo::run(&mut document(&cargo))?.success() {
        failed.push("doc");
    }

    if failed.is_empty() {
        eprintln!("check: all is well");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("check: failed: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

/// Libraries only: the program `brigade` would write over the pages of the library `brigade`.
fn document(cargo: &Cargo<'_>) -> Command {
    let mut command = cargo.command(&["doc", "--workspace", "--lib", "--no-deps"]);
    match env::var_os("RUSTDOCFLAGS") {
        // The variable replaces what the configuration says, so it must grow, not be set.
        Some(mut flags) => {
            flags.push(" -D warnings");
            command.env("RUSTDOCFLAGS", flags);
        }
        // Joined by cargo to the run path in .cargo/libtorch.toml.
        None => {
            command.args(["--config", "build.rustdocflags=['-D', 'warnings']"]);
        }
    }
    command
}
