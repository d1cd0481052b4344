//! `cargo xtask fuzz`: runs libFuzzer on the parsers of untrusted bytes.
//!
//! With a nightly toolchain and cargo-fuzz, the address sanitizer is used, too. Without them the same program is built
//! with the stable toolchain: the coverage that guides libFuzzer comes from passes of LLVM, which every toolchain has,
//! and the parsers have no unsafe code.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::cargo::{self, plain_cargo};
use crate::checkout::Checkout;
use crate::setup;

/// What to fuzz, for how long.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The reader: a folder's name in fuzz/regressions/; without one, all in turn
    target: Option<String>,
    /// For each reader
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Afterwards, add what reached new code to the corpus in fuzz/corpus/, as few and small inputs as will do
    #[arg(long)]
    keep: bool,
}

pub(crate) fn run(checkout: &Checkout, options: &Options) -> Result<ExitCode> {
    ensure!(
        options.minutes.is_finite() && options.minutes > 0.0,
        "--minutes {} is not a duration: give a number above 0",
        options.minutes
    );
    let known = targets(checkout)?;
    let chosen: Vec<&String> = match &options.target {
        None => known.iter().collect(),
        Some(name) => match known.iter().find(|target| *target == name) {
            Some(target) => vec![target],
            None => bail!("unknown reader {name}: choose one of {}", known.join(", ")),
        },
    };
    let fuzzer = Fuzzer { checkout, nightly: has_cargo_fuzz(checkout) };
    if !fuzzer.nightly {
        eprintln!(
            "note: without the address sanitizer; `rustup toolchain install nightly` and `cargo install \
             cargo-fuzz` bring it"
        );
    }
    let mut failed = Vec::new();
    for target in &chosen {
        if !fuzzer.fuzz(target, options)? {
            failed.push(target.as_str());
        }
    }
    if failed.is_empty() {
        eprintln!("{} readers, {} minutes each: nothing was found", chosen.len(), options.minutes);
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!(
        "failures in {}: the inputs lie in {}; copy each to fuzz/regressions/READER/ under a name that says \
         what it is, so that the suite reads it, and mend the reader",
        failed.join(", "),
        fuzzer.folder("failed").display()
    );
    Ok(ExitCode::FAILURE)
}

/// Returns the names of the targets, in order. Each has a folder of inputs, which a test of brigade-fuzz-readers
/// ensures.
fn targets(checkout: &Checkout) -> Result<Vec<String>> {
    let folder = checkout.root().join("fuzz/regressions");
    let listed =
        fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut names: Vec<String> =
        listed.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

fn has_cargo_fuzz(checkout: &Checkout) -> bool {
    let mut command = nightly_cargo(checkout);
    command.args(["fuzz", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Returns rustup's cargo: the one that started this process belongs to one toolchain.
fn nightly_cargo(checkout: &Checkout) -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly").current_dir(checkout.root());
    for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"] {
        command.env_remove(name);
    }
    command
}

struct Fuzzer<'a> {
    checkout: &'a Checkout,
    nightly: bool,
}

impl Fuzzer<'_> {
    /// Fuzzes one target. Returns `true` if nothing was found.
    fn fuzz(&self, target: &str, options: &Options) -> Result<bool> {
        let program = self.program(target)?;
        let (known, found) = (self.folder("known").join(target), self.folder("new").join(target));
        let failed = self.folder("failed");
        // Its content is in the checkout, or was removed from it for a reason.
        if let Err(error) = fs::remove_dir_all(&known)
            && error.kind() != ErrorKind::NotFound
        {
            return Err(error).with_context(|| format!("cannot remove {}", known.display()));
        }
        for folder in [&known, &found, &failed] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make folder {}", folder.display()))?;
        }
        program.copy_inputs("--unpack", &known)?;
        let mut prefix = failed.join(target).into_os_string();
        prefix.push("-");
        let seconds = (options.minutes * 60.0).ceil().max(1.0);
        let mut command = program.command();
        // New inputs are written to the first folder.
        command.args([&found, &known]).args([
            format!("-max_total_time={seconds}"),
            format!("-max_len={MAX_INPUT_LEN}"),
            format!("-timeout={TIMEOUT_SECONDS}"),
            format!("-rss_limit_mb={MEMORY_MB}"),
            "-print_final_stats=1".to_owned(),
            "-verbosity=0".to_owned(),
            format!("-artifact_prefix={}", Path::new(&prefix).display()),
        ]);
        let sound = cargo::run(&mut command)?.success();
        if sound && options.keep {
            let mut merge = program.command();
            // Counters of branches guide the search, but would keep thousands of inputs.
            merge.args([&known, &found]).args(["-set_cover_merge=1", "-use_counters=0"]);
            merge.arg(format!("-max_len={MAX_KEPT_LEN}"));
            ensure!(
                cargo::run(&mut merge)?.success(),
                "the new inputs of {target} cannot be merged with the known"
            );
            program.copy_inputs("--pack", &known)?;
        }
        Ok(sound)
    }

    /// Builds the program, with libtorch if this target needs it.
    fn program<'a>(&self, target: &'a str) -> Result<Program<'a>> {
        let folder = self.folder("build");
        let mut build = if self.nightly {
            let mut build = nightly_cargo(self.checkout);
            build.args(["fuzz", "build", "reader"]);
            build
        } else {
            let mut build = plain_cargo(self.checkout);
            build.args(["build", "--release", "--manifest-path", "fuzz/Cargo.toml"]);
            build.env("RUSTFLAGS", FLAGS.join(" "));
            build
        };
        // With an explicit target, build scripts are built without the flags.
        build.args(["--target", HOST, "--target-dir"]).arg(&folder);
        if LIBTORCH.contains(&target) {
            setup::ensure(self.checkout)?;
            build.args(["--features", "libtorch"]);
        }
        ensure!(cargo::run(&mut build)?.success(), "the program for {target} cannot be built");
        Ok(Program { path: folder.join(HOST).join("release/reader"), target })
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.checkout.root().join("target/fuzz").join(name)
    }
}

/// Program of `fuzz/`, for one target.
struct Program<'a> {
    path: PathBuf,
    target: &'a str,
}

impl Program<'_> {
    /// Returns a command to which folders and libFuzzer's options are added.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.env("BRIGADE_FUZZ_TARGET", self.target);
        command
    }

    /// Copies inputs: `--unpack` from the checkout into a folder, or `--pack` from the folder into the checkout.
    fn copy_inputs(&self, direction: &str, folder: &Path) -> Result<()> {
        let mut command = self.command();
        command.arg(format!("{direction}={}", folder.display()));
        ensure!(
            cargo::run(&mut command)?.success(),
            "the inputs of {} cannot be copied",
            self.target
        );
        Ok(())
    }
}

/// Flags of cargo-fuzz, without the sanitizer.
const FLAGS: [&str; 7] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
];
const HOST: &str = "x86_64-unknown-linux-gnu";
/// Targets in crates that link libtorch, which the program contains with its feature of this name.
const LIBTORCH: [&str; 2] = ["archive", "idx"];
const MAX_INPUT_LEN: usize = 64 << 10;
/// Maximum size of inputs that are kept in the repository, in bytes.
const MAX_KEPT_LEN: usize = 4 << 10;
/// Wall-clock limit for a parser that never ends. The effective limit is in the targets.
const TIMEOUT_SECONDS: u32 = 300;
/// Memory limit in MB.
const MEMORY_MB: u32 = 2048;
