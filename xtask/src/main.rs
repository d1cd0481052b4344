//! `cargo xtask`: tasks of contributors and CI on this checkout, one command each.

mod bench;
mod cargo;
mod check;
mod checkout;
mod cross;
mod cuda;
mod demo;
mod docs;
mod fuzz;
mod git;
mod gpu;
mod install;
mod kernels;
mod metadata;
mod nextest;
mod notebook;
mod package;
mod python_environment;
mod release;
mod sbom;
mod semver;
mod setup;
mod suite;
mod tidy;
mod workspace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::checkout::Checkout;
use crate::suite::Selection;

/// Everything one does to this checkout: set up, demonstrate, test, check, measure.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fetch libtorch into the user's cache, so that plain cargo commands work
    ///
    /// As `brigade setup` does for other projects. The wheels come from the index that pip uses, by
    /// name, version and checksum. LIBTORCH=<folder> or LIBTORCH_USE_PYTORCH=1 in the environment
    /// wins: then nothing is fetched.
    Setup {
        /// Also fetch what CUDA needs: libtorch's CUDA libraries, NVIDIA's, and headers for the
        /// feature `cuda` (2.5 GB to download, 3.6 GB on disk)
        #[arg(long)]
        cuda: bool,
        /// Another list of wheels, for tests
        #[arg(long, value_name = "FILE", hide = true)]
        pins: Option<PathBuf>,
    },
    /// Train the FashionMNIST CNN with two processes on the embedded digits; wants 97 %
    Demo,
    /// Run the whole test suite, multi-process tests and doc tests included
    ///
    /// First installs what tests with several hosts, etcd and schedulers need, as `install` does:
    /// without a question as root, with the package manager's own on a terminal, else not at all.
    /// Tests that cannot run are ignored, and told at the end with the command that installs what
    /// they lack; where BRIGADE_REQUIRE=hosts,etcd,... names it, they fail.
    ///
    /// Uses cargo-nextest, which cargo compiles into tools/ where it is not installed. At the end: the slowest tests
    /// and programs, and how long they waited.
    Test {
        /// Install nothing
        #[arg(long)]
        no_install: bool,
        /// Run the tests of the packages that differ from a commit, then those of packages that depend on them,
        /// nearest first [default: the last commit that is pushed, or HEAD]
        #[arg(
            long,
            value_name = "COMMIT",
            num_args = 0..=1,
            require_equals = true,
            conflicts_with = "runner_arguments"
        )]
        changed: Option<Option<String>>,
        /// Build the packages as `package` does, then run the tests that install them: minutes, and only here
        #[arg(long, conflicts_with_all = ["runner_arguments", "changed", "processor", "device"])]
        slow: bool,
        /// Also write the times of all tests and programs, as a table, to target/timings.md
        #[arg(long)]
        timings: bool,
        /// Run the tests of numbers alone, with the kernels of another processor: avx2 (one without AVX-512), avx512
        /// (one without instructions for bfloat16: those alone that compute in 16 bits, by their names)
        ///
        /// Sums are made in another order there: a tolerance that fits one processor's rounding fails.
        #[arg(
            long,
            value_name = "INSTRUCTIONS",
            value_parser = suite::PROCESSORS.map(|it| it.name),
            conflicts_with_all = ["runner_arguments", "changed"]
        )]
        processor: Option<String>,
        /// Run the tests of numbers alone, on another device: fake, a GPU made of host memory; or the tests on a TPU: tpu
        ///
        /// fake shows where tensors are, not what a GPU computes. `gpu` runs the tests on a real one. tpu needs what
        /// `install tpu` fetches, whose plug-in computes on the CPU.
        #[arg(
            long,
            value_name = "DEVICE",
            value_parser = ["fake", "tpu"],
            conflicts_with_all = ["runner_arguments", "changed", "processor"]
        )]
        device: Option<String>,
        /// For cargo-nextest: a part of a test's name, or options such as `-p brigade-sampling`, with which only programs
        /// are built that these tests start or link. Doc tests are left out then, and nothing is installed.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        runner_arguments: Vec<String>,
    },
    /// Run a test program and add the time it took to a file: what cargo-nextest calls
    #[command(hide = true)]
    Measure {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Install what tests need besides Rust
    ///
    /// hosts (sshd, nft, ip, ...), etcd, schedulers (slurm, open-mpi) and python come from Debian's
    /// packages, as root or with sudo; no service is started. pytorch (PyTorch and Accelerate, 3 GB)
    /// and trackers (TensorBoard and MLflow) come from pip, into ignored folders of the checkout, docs
    /// (mdBook, for `docs`) and semver-checks by cargo into others; arm64 is for `cross`. tpu (TorchTPU
    /// with a plug-in for the CPU, 160 MB) comes from pip into ~/.cache/brigade, as by `brigade setup --tpu=cpu`.
    Install {
        /// What to install [default: all that comes from packages of the system]
        #[arg(value_name = "NEED")]
        needs: Vec<String>,
        /// Another list of wheels of TorchTPU, for tests
        #[arg(long, value_name = "FILE", hide = true)]
        pins: Option<PathBuf>,
    },
    /// Lint: formatting, tidy, clippy and rustdoc, warnings as errors
    Check {
        /// Lint these packages alone
        #[arg(value_name = "PACKAGE")]
        packages: Vec<String>,
        /// Instead, check the feature `cuda`: that NVRTC compiles the kernels, clippy, a build of all
        /// programs and tests, linked with libtorch's CUDA libraries, and the tests that need no GPU
        ///
        /// Needs no GPU. Builds in target/cuda, with the libtorch that `setup --cuda` has fetched, or the
        /// one that LIBTORCH or LIBTORCH_USE_PYTORCH=1 names.
        #[arg(long, conflicts_with = "packages")]
        cuda: bool,
        /// Instead, compile the GPU kernels with this NVRTC (libnvrtc.so), as --cuda does first
        #[arg(long, value_name = "NVRTC", conflicts_with_all = ["packages", "cuda"])]
        kernels: Option<PathBuf>,
    },
    /// Cross-compile the launcher for aarch64, and run it in an emulator
    ///
    /// Needs what `install arm64` installs. What it prints is compared with what this host's launcher prints.
    Cross {
        /// Also train on the embedded digits, with libtorch's wheel for aarch64 (440 MB to download)
        #[arg(long)]
        library: bool,
    },
    /// Check the invariants of ARCHITECTURE.md that a program can check
    Tidy {
        /// First write the table of crates in ARCHITECTURE.md anew, from the descriptions in Cargo.toml
        #[arg(long)]
        write: bool,
    },
    /// Build the book in docs/ and the API reference as HTML, and check the links
    ///
    /// Into target/book. Needs mdBook, which `install docs` installs.
    Docs {
        /// Leave out the API reference, which needs a build of all crates
        #[arg(long)]
        no_api: bool,
    },
    /// Open Jupyter with the Rust kernel evcxr on the notebooks of examples/notebooks, or run them
    ///
    /// The first time, Jupyter (from PyPI) and evcxr are installed into notebooks-env/, which git ignores.
    Notebook(notebook::Options),
    /// Fuzz a reader of untrusted input with libFuzzer
    ///
    /// Files, messages from peers, settings: dev/fuzz-readers/src/readers/ lists the readers. Uses cargo-fuzz and the
    /// address sanitizer where a nightly toolchain and cargo-fuzz are installed. The suite runs the same readers on
    /// the corpus and some hundred mutations of it.
    Fuzz(fuzz::Options),
    /// Build the files of a release: wheel, source distribution, archives with completions and manual pages, lists of
    /// components, checksums
    ///
    /// Into target/dist. maturin and zig come from PyPI into tools/packaging. The wheel's program runs with glibc 2.17
    /// and later. Where Rust's standard library for musl is installed, an archive with a static program is built as
    /// well. Also packs the crates. `test --slow` installs and runs what was built.
    Package(package::Options),
    /// Make a release: write the version, check what crates.io checks, build the packages, commit, and tag
    ///
    /// Needs a clean working tree and entries under "Unreleased" in CHANGELOG.md. Pushes and uploads nothing: the last
    /// lines name the commands for that. At a commit that has the release's tag, --dry-run checks and builds it again.
    Release(release::Options),
    /// Compare the public API with that of the last release, and refuse changes that the version does not allow
    ///
    /// By cargo-semver-checks, which cargo compiles into tools/ where it is not installed. Each published library is
    /// compared with all features but `cuda`. `check` does the same where it is installed, `release` always.
    Semver(semver::Options),
    /// Run what needs a GPU: tests, benchmarks, and a report; or make an archive of it for another machine
    ///
    /// Builds with the feature `cuda` in target/gpu and writes target/gpu/report/report.md and report.json. Uses the
    /// libtorch that `setup --cuda` has fetched, or the one that LIBTORCH or LIBTORCH_USE_PYTORCH=1 names.
    Gpu(gpu::Options),
    /// Run the benchmarks (the package brigade-bench, in release)
    Bench {
        /// First install PyTorch and Accelerate, to compare with, as `install pytorch` does
        #[arg(long)]
        peers: bool,
        /// Instead, draw the README's picture of the results in bench/results/
        #[arg(long, conflicts_with_all = ["peers", "bench_arguments"])]
        picture: bool,
        /// For the benchmarks: parts of their names, and options; without any, all of them run
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        bench_arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    let checkout = Checkout::find()?;
    match command {
        Command::Setup { cuda, pins } => setup::run(&checkout, cuda, pins.as_deref()),
        Command::Demo => demo::run(&checkout),
        Command::Test {
            no_install,
            changed,
            slow,
            timings,
            processor,
            device,
            runner_arguments,
        } => {
            let selection = match (changed, processor, device) {
                (Some(commit), _, _) => Selection::Changed(commit),
                (None, Some(processor), _) => Selection::OnProcessor(processor),
                (None, None, Some(device)) => Selection::OnDevice(device),
                (None, None, None) if slow => Selection::Slow,
                (None, None, None) if runner_arguments.is_empty() => Selection::All,
                (None, None, None) => Selection::Chosen(runner_arguments),
            };
            suite::run(&checkout, &selection, !no_install, timings)
        }
        Command::Measure { command } => suite::timings::measure(&command),
        Command::Install { needs, pins } => install::run(&checkout, &needs, pins.as_deref()),
        Command::Check { cuda: true, .. } => cuda::run(&checkout),
        Command::Check { kernels: Some(nvrtc), .. } => kernels::run(&nvrtc),
        Command::Check { packages, .. } if packages.is_empty() => check::run(&checkout),
        Command::Check { packages, .. } => check::run_on(&checkout, &packages),
        Command::Cross { library } => cross::run(&checkout, library),
        Command::Tidy { write } => tidy::run(&checkout, write),
        Command::Docs { no_api } => docs::run(&checkout, no_api),
        Command::Notebook(options) => notebook::run(&checkout, &options),
        Command::Fuzz(options) => fuzz::run(&checkout, &options),
        Command::Package(options) => package::run(&checkout, &options),
        Command::Release(options) => release::run(&checkout, &options),
        Command::Semver(options) => semver::run(&checkout, &options),
        Command::Gpu(options) => gpu::run(&checkout, &options),
        Command::Bench { picture: true, .. } => bench::draw(&checkout),
        Command::Bench { peers, bench_arguments, .. } => {
            bench::run(&checkout, peers, &bench_arguments)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_commands_of_the_pages_are_understood() {
        let root = Checkout::find().unwrap();
        let folders = docs::FOLDERS.map(|folder| root.root().join("docs").join(folder));
        let files = folders.into_iter().flat_map(|folder| fs::read_dir(folder).unwrap());
        let files = files.map(|it| it.unwrap().path());
        let pages = files.filter(|path| path.extension().is_some_and(|it| it == "md"));
        let mut commands = 0;
        for page in pages.chain([root.root().join("README.md")]) {
            let text = fs::read_to_string(&page).unwrap();
            let lines = text.lines().filter(|line| line.starts_with("cargo xtask "));
            for line in lines {
                let words = line.split(" #").next().unwrap_or(line).split_whitespace().skip(1);
                if let Err(error) = Arguments::try_parse_from(words) {
                    panic!("{}: {line}: {error}", page.display());
                }
                commands += 1;
            }
        }
        assert!(commands >= 3, "{commands} commands");
    }
}
