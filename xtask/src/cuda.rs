//! `cargo xtask check --cuda`: that everything compiles, links and runs with the feature `cuda`, on a machine
//! that needs no GPU.

use std::env;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result};
use brigade_setup::Libtorch;

use crate::cargo::{self, plain_cargo};
use crate::checkout::Checkout;
use crate::{setup, suite};

/// Runs every step, also after one failed, and names those that failed.
pub(crate) fn run(checkout: &Checkout) -> Result<ExitCode> {
    let libtorch = setup::for_cuda(checkout)?;
    eprintln!("{}", libtorch.description());
    let begun = Instant::now();
    let mut failed = Vec::new();
    for (name, arguments) in STEPS {
        let started = Instant::now();
        let status = cargo::run(&mut command(checkout, &libtorch, arguments)?)?;
        eprintln!("{name}: {} s", started.elapsed().as_secs());
        if !status.success() {
            failed.push(*name);
        }
    }
    // Some tests want a process of their own, as cargo-nextest gives them.
    let runner: &[&str] = if suite::has_nextest() { &["nextest", "run"] } else { &["test"] };
    let started = Instant::now();
    let status = cargo::run(&mut command(checkout, &libtorch, &[runner, TESTS].concat())?)?;
    eprintln!("tests: {} s", started.elapsed().as_secs());
    if !status.success() {
        failed.push("tests");
    }
    let seconds = begun.elapsed().as_secs();
    if failed.is_empty() {
        eprintln!("check --cuda: all is well, in {seconds} s");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("check --cuda: failed, in {seconds} s: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

/// Cargo with that libtorch, in a folder of its own: the other one's builds stay.
fn command(checkout: &Checkout, libtorch: &Libtorch, arguments: &[&str]) -> Result<Command> {
    let lib = libtorch.folder().join("lib");
    let lib = lib.to_str().with_context(|| format!("{} is not UTF-8", lib.display()))?;
    let mut cargo = plain_cargo(checkout);
    cargo.args(arguments).args(["--features", FEATURES]);
    if arguments[0] == "clippy" {
        cargo.args(["--", "-D", "warnings"]);
    }
    cargo.env("CARGO_TARGET_DIR", checkout.root().join("target/cuda"));
    // Debug information would double the folder.
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "0");
    if env::var_os("LIBTORCH_USE_PYTORCH").is_none() {
        cargo.env("LIBTORCH", libtorch.folder());
    }
    if libtorch.bypasses_version_check() {
        cargo.env("LIBTORCH_BYPASS_VERSION_CHECK", "1");
    }
    // .cargo/libtorch.toml names the run path of the other libtorch, for doc tests.
    cargo.env("RUSTDOCFLAGS", format!("-C link-arg=-Wl,-rpath,{lib}"));
    Ok(cargo)
}

const FEATURES: &str = "brigade/cuda,brigade-gpukit/cuda,brigade-torch/cuda,brigade-train/cuda";

/// What is run besides the tests.
const STEPS: &[(&str, &[&str])] = &[
    ("clippy", &["clippy", "--workspace", "--all-targets"]),
    ("build", &["test", "--workspace", "--bins", "--examples", "--tests", "--no-run"]),
    // Tests start programs of the target folder.
    ("programs", &["build", "--workspace", "--bins", "--examples"]),
];

const TESTS: &[&str] = &[
    "--no-fail-fast",
    "-p",
    "brigade",
    "-p",
    "brigade-torch",
    "-p",
    "brigade-train",
    "-p",
    "brigade-launch",
];
