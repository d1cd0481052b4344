//! `cargo xtask cross`: the programs for aarch64, compiled on another processor and run in an emulator.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use anyhow::{Context, Result, bail, ensure};
use brigade_libtorch_setup::{Cache, Kind, Libtorch, Pins, Wanted};
use brigade_test_needs::Need;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::workspace::Workspace;

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Compiles the launcher for aarch64 and compares what it prints in an emulator with what this host's prints; with
/// `library`, the same for a training with libtorch's wheel for aarch64.
pub(crate) fn run(checkout: &Checkout, library: bool) -> Result<ExitCode> {
    if let Some(lack) = Need::Arm64.lacking() {
        bail!("{lack}");
    }
    add_target()?;
    let cross = Cross {
        cargo: Cargo::new(checkout)?,
        folder: Workspace::of(checkout)?.target.join("cross"),
        libtorch: if library { Some(fetched()?) } else { None },
    };
    cross.launcher(checkout)?;
    if library {
        cross.training(checkout)?;
    }
    eprintln!("cross: all is well");
    Ok(ExitCode::SUCCESS)
}

/// Has rustup install the standard library of the target; another distribution of Rust must have it already.
fn add_target() -> Result<()> {
    match Command::new("rustup").args(["target", "add", TARGET]).status() {
        Ok(status) if !status.success() => {
            bail!("rustup has not added {TARGET}: its last lines say why")
        }
        Ok(_) => {}
        Err(_) => eprintln!(
            "there is no rustup here: Rust's standard library for {TARGET} must be installed"
        ),
    }
    Ok(())
}

fn fetched() -> Result<Libtorch> {
    let pins = Pins::for_architecture("aarch64")?;
    Libtorch::find_or_fetch(&Wanted::Fetched(Kind::Cpu), &Cache::of_user()?, &pins)
}

struct Cross<'a> {
    cargo: Cargo<'a>,
    /// The target folder for this: its build scripts have other variables.
    folder: PathBuf,
    libtorch: Option<Libtorch>,
}

impl Cross<'_> {
    /// What the launcher prints without starting a process: an emulator of one process runs no other program of its
    /// processor.
    fn launcher(&self, checkout: &Checkout) -> Result<()> {
        let emulated = self.build("brigade-cli", "brigade")?;
        let host = ["build", "-p", "brigade-cli"];
        ensure!(self.cargo.run(&host)?.success(), "the launcher could not be built for this host");
        let here = Workspace::of(checkout)?.target.join("debug/brigade");
        let weights = "crates/nn/tests/fixtures/kinds.safetensors";
        let commands: [&[&str]; 6] = [
            &["--help"],
            &["explain", "shards", "--samples", "50", "--batch-size", "12", "--nproc", "4"],
            &["explain", "schedule", "one-cycle", "--max-lr", "0.3", "--steps", "41"],
            &["estimate", "--params", "1000000000", "--nproc", "8", "--sharding", "zero3"],
            &["checkpoint", "inspect", weights],
            &["launch", "--nproc", "2", "--explain", "true"],
        ];
        for arguments in commands {
            let emulated = output(self.emulator(checkout).arg(&emulated).args(arguments))?;
            let here = output(Command::new(&here).args(arguments).current_dir(checkout.root()))?;
            let (emulated, here) = (text(&emulated.stdout), text(&here.stdout));
            ensure!(
                !here.is_empty() && emulated == here,
                "`brigade {}` prints on aarch64\n{emulated}and here\n{here}",
                arguments.join(" ")
            );
        }
        Ok(())
    }

    /// One process on the embedded digits, to an accuracy that a network without training does not have.
    fn training(&self, checkout: &Checkout) -> Result<()> {
        let program = self.build("fashion_mnist", "fashion_mnist")?;
        let mut command = self.emulator(checkout);
        command.arg(&program).args(["--data", "digits", "--epochs", "2"]);
        eprintln!("$ {}", cargo::line(&command));
        let output = output(&mut command)?;
        let text = text(&output.stdout);
        eprint!("{text}");
        let percent = text.lines().filter_map(crate::demo::accuracy_percent).next_back();
        let percent =
            percent.context("the training printed no line `epoch E/N, accuracy = ...`")?;
        ensure!(
            percent > WANTED_PERCENT,
            "the accuracy is {percent:.2} %, and {WANTED_PERCENT} % was expected"
        );
        Ok(())
    }

    fn build(&self, package: &str, program: &str) -> Result<PathBuf> {
        let mut command =
            self.cargo.command(&["build", "--target", TARGET, "-p", package, "--bin", program]);
        command
            .env("CARGO_TARGET_DIR", &self.folder)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
        if let Some(libtorch) = &self.libtorch {
            command.env("LIBTORCH", libtorch.folder());
        }
        ensure!(cargo::run(&mut command)?.success(), "{package} could not be built for {TARGET}");
        Ok(self.folder.join(TARGET).join("debug").join(program))
    }

    fn emulator(&self, checkout: &Checkout) -> Command {
        let mut command = Command::new("qemu-aarch64-static");
        command.args(["-L", SYSTEM]).current_dir(checkout.root());
        if let Some(libtorch) = &self.libtorch {
            command.arg("-E").arg(library_path(libtorch.folder()));
        }
        command
    }
}

/// `LD_LIBRARY_PATH` with libtorch's libraries, for the emulated processor's loader alone.
fn library_path(libtorch: &Path) -> OsString {
    let mut variable = OsStr::new("LD_LIBRARY_PATH=").to_owned();
    variable.push(libtorch.join("lib"));
    variable
}

fn output(command: &mut Command) -> Result<Output> {
    let line = cargo::line(command);
    let output = command.output().with_context(|| format!("cannot start {line}"))?;
    ensure!(output.status.success(), "{line}: {}\n{}", output.status, text(&output.stderr));
    Ok(output)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The system libraries of aarch64, from Debian's package of the compiler.
const SYSTEM: &str = "/usr/aarch64-linux-gnu";

/// Ten classes: one that has learned nothing is right about one time in ten.
const WANTED_PERCENT: f64 = 80.0;
