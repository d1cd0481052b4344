//! `cargo xtask gpu`: runs tests and benchmarks on this machine's GPU, or packs an archive that runs them on another
//! machine.

mod build;
mod programs;
mod stage;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use brigade_test_needs::Need;

use crate::cargo;
use crate::checkout::Checkout;
use crate::python_environment::Environment;
use build::Build;

/// The options of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Make an archive of all that runs, and run nothing: it needs only Python with PyTorch 2.11 or newer there
    ///
    /// A `.tar.xz`, or with that ending a `.tar` that is not compressed. On the other machine:
    /// `python3 -m tarfile -e FILE && python3 brigade-gpu/run.py`.
    #[arg(long, value_name = "FILE")]
    pack: Option<PathBuf>,
    /// The libtorch to build for; repeat it for several [default: for an archive both, else 2.13]
    #[arg(long, value_name = "VERSION", value_parser = ["2.11", "2.13"])]
    libtorch: Vec<String>,
    /// Run this part alone: facts, tests, nccl or bench; repeat it for several
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// The time for everything [default: 480s]
    #[arg(long, value_name = "TIME")]
    budget: Option<String>,
    /// Build without the feature `cuda`, with the checkout's libtorch, as the suite is built: for the suite's test
    #[arg(long, hide = true)]
    cpu: bool,
    /// For the program that runs the parts: `-- --help` lists its options
    #[arg(last = true)]
    runner_arguments: Vec<String>,
}

/// Builds the programs, puts everything into one folder, and runs or packs it.
pub(crate) fn run(checkout: &Checkout, options: &Options) -> Result<ExitCode> {
    let folder = checkout.root().join("target/gpu");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let versions: Vec<&str> = match (options.libtorch.as_slice(), &options.pack) {
        ([], Some(_)) => vec!["2.13", "2.11"],
        ([], None) => vec!["2.13"],
        (named, _) => named.iter().map(String::as_str).collect(),
    };
    let builds = if options.cpu {
        vec![Build::of_the_suite(checkout)?]
    } else {
        let builds = versions.iter().map(|version| Build::with_cuda(checkout, version));
        builds.collect::<Result<Vec<_>>>()?
    };
    let tests = programs::test_programs(checkout)?;
    let mut built = Vec::new();
    for build in &builds {
        eprintln!("building for libtorch {}", build.libtorch.version());
        let Some(programs) = build.run(&tests)? else { return Ok(ExitCode::FAILURE) };
        built.push((build, programs));
    }
    let stage = stage::Stage::make(checkout, &folder, &tests, &built)?;
    if !options.cpu {
        stage.holds_no_path_of(&builds)?;
    }
    match &options.pack {
        Some(file) => pack(stage.folder(), file),
        None => run_here(checkout, &folder, &stage, &builds[0], options),
    }
}

fn pack(stage: &Path, file: &Path) -> Result<ExitCode> {
    eprintln!("packing {}", file.display());
    let mut python = Command::new("python3");
    python.args(["-c", include_str!("gpu/pack.py")]).args([stage, file]);
    let status = python.status().context("cannot start python3, which packs the archive")?;
    ensure!(status.success(), "packing {} failed", file.display());
    let bytes =
        fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?.len();
    eprintln!("{}: {:.1} MB", file.display(), bytes as f64 / 1e6);
    let compressed = file.extension().is_some_and(|it| it == "xz");
    ensure!(
        !compressed || bytes <= LARGEST,
        "the archive is larger than {} MB: build for one libtorch (--libtorch 2.11)",
        LARGEST / 1_000_000
    );
    Ok(ExitCode::SUCCESS)
}

fn run_here(
    checkout: &Checkout,
    folder: &Path,
    stage: &stage::Stage,
    build: &Build<'_>,
    options: &Options,
) -> Result<ExitCode> {
    let mut python = Command::new("python3");
    python.arg(stage.folder().join("run.py")).arg("--report").arg(folder.join("report"));
    // Other frameworks for the benchmarks' comparisons.
    let peers = Environment::of(checkout, Need::Pytorch).filter(Environment::is_installed);
    if let Some(peers) = peers {
        python.arg("--python").arg(peers.python());
    }
    for part in &options.only {
        python.args(["--only", part]);
    }
    if let Some(budget) = &options.budget {
        python.args(["--budget", budget]);
    }
    python.args(&options.runner_arguments).env("LIBTORCH", build.libtorch.folder());
    Ok(cargo::exit_code(cargo::run(&mut python)?))
}

/// Maximum size of the archive, which most ways of transfer accept.
const LARGEST: u64 = 60_000_000;
