//! `cargo xtask bench`: runs the package brigade-bench, with comparisons to other frameworks on request.

use std::process::ExitCode;

use anyhow::{Context, Result};
use brigade_test_needs::Need;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::python_environment::Environment;

/// Runs the benchmarks. They take the Python of other frameworks from BRIGADE_PEER_PYTHON; without it they skip the
/// comparisons.
pub(crate) fn run(checkout: &Checkout, peers: bool, arguments: &[String]) -> Result<ExitCode> {
    let environment =
        Environment::of(checkout, Need::Pytorch).context("PyTorch has no environment")?;
    if peers {
        environment.install()?;
    }
    let cargo = Cargo::new(checkout)?;
    // Started by the launcher's comparisons.
    let code = cargo::exit_code(cargo::run(&mut cargo.command(&[
        "build",
        "--release",
        "-p",
        "brigade-cli",
    ]))?);
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let mut command = cargo.command(&["run", "--release", "-p", "brigade-bench"]);
    // Its comparisons have names of their own; others measure programs without it.
    if arguments.iter().any(|it| it.starts_with("tpu-")) {
        command.args(["--features", "tpu"]);
    }
    command.arg("--").args(arguments);
    if environment.is_installed() {
        command.env("BRIGADE_PEER_PYTHON", environment.python());
    } else {
        eprintln!("note: no peers; `cargo xtask install pytorch` installs PyTorch to compare with");
    }
    Ok(cargo::exit_code(cargo::run(&mut command)?))
}

/// Draws docs/images/benchmarks.svg from bench/results/readme.jsonl. Its rows are those of docs/benchmarks.md, which a
/// test of brigade-plot compares.
pub(crate) fn draw(checkout: &Checkout) -> Result<ExitCode> {
    let cargo = Cargo::new(checkout)?;
    let example = ["run", "--quiet", "-p", "brigade-plot", "--example", "ratios", "--"];
    let files = ["bench/results/readme.jsonl", "docs/images/benchmarks.svg"];
    Ok(cargo::exit_code(cargo::run(&mut cargo.command(&[&example[..], &files].concat()))?))
}
