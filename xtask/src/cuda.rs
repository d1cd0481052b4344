//! `cargo xtask check --cuda`: checks that everything compiles, links and runs with the feature `cuda`, on a machine
//! without a GPU.

use std::env;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result};
use brigade_libtorch_setup::Libtorch;

use crate::cargo::{self, plain_cargo};
use crate::checkout::Checkout;
use crate::nextest::Nextest;
use crate::{kernels, setup};

/// Runs every step, also after a failure, and lists those that failed.
pub(crate) fn run(checkout: &Checkout) -> Result<ExitCode> {
    let nextest = Nextest::find_or_install(checkout)?;
    let libtorch = setup::for_cuda(checkout)?;
    eprintln!("{}", libtorch.description());
    let begun = Instant::now();
    let mut failed = Vec::new();
    if !kernels::check(&libtorch.nvrtc()?)? {
        failed.push("kernels");
    }
    for (name, arguments) in STEPS {
        let started = Instant::now();
        let status =
            cargo::run(&mut command(checkout, &libtorch, plain_cargo(checkout), arguments)?)?;
        eprintln!("{name}: {} s", started.elapsed().as_secs());
        if !status.success() {
            failed.push(*name);
        }
    }
    let started = Instant::now();
    let tests = nextest.plain(checkout);
    let status = cargo::run(&mut command(checkout, &libtorch, tests, TESTS)?)?;
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

/// Returns cargo with that libtorch, in a target folder of its own, so that builds with the other one are kept.
fn command(
    checkout: &Checkout,
    libtorch: &Libtorch,
    mut cargo: Command,
    arguments: &[&str],
) -> Result<Command> {
    let lib = libtorch.folder().join("lib");
    let lib = lib.to_str().with_context(|| format!("{} is not UTF-8", lib.display()))?;
    cargo.args(arguments).args(["--features", FEATURES]);
    if arguments[0] == "clippy" {
        cargo.args(["--", "-D", "warnings"]);
    }
    cargo.env("CARGO_TARGET_DIR", checkout.root().join("target/cuda"));
    // Debug information would double the size of the folder.
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "0");
    if env::var_os("LIBTORCH_USE_PYTORCH").is_none() {
        cargo.env("LIBTORCH", libtorch.folder());
    }
    if libtorch.bypasses_version_check() {
        cargo.env("LIBTORCH_BYPASS_VERSION_CHECK", "1");
    }
    // .cargo/libtorch.toml contains the run path of the other libtorch, for doc tests.
    cargo.env("RUSTDOCFLAGS", format!("-C link-arg=-Wl,-rpath,{lib}"));
    Ok(cargo)
}

const FEATURES: &str =
    "brigade/cuda,brigade-test-device/cuda,brigade-torch/cuda,brigade-train/cuda";

/// Steps besides the tests.
const STEPS: &[(&str, &[&str])] = &[
    ("clippy", &["clippy", "--workspace", "--all-targets"]),
    ("build", &["test", "--workspace", "--bins", "--examples", "--tests", "--no-run"]),
    // Tests start programs of the target folder.
    ("programs", &["build", "--workspace", "--bins", "--examples"]),
];

/// Arguments for the tests. Excluded are tests of simulated GPUs in host memory, which libtorch's own CUDA kernels
/// replace here, and the start line in the book, where such a program also prints why it has no GPU.
const TESTS: &[&str] = &[
    "run",
    "--workspace",
    "--no-fail-fast",
    "-E",
    "not (binary(gpu) | test(of_a_gpu_go_by_the_hosts_memory) | test(projects_print_what_the_book_shows))",
];
