//! `cargo xtask cross`: the programs for aarch64, compiled on another processor and run in an emulator.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use brigade_libtorch_setup::{Cache, Kind, Libtorch, Pins, Wanted};
use brigade_test_needs::Need;
use tempfile::TempDir;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::demo;
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
        root: emulated_root()?,
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
    root: TempDir,
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
            &["estimate", "7B", "--nproc", "8"],
            &["checkpoint", "inspect", weights],
            // Else each job has a name of its own.
            &["launch", "--nproc", "2", "--rdzv-id", "cross", "--explain", "true"],
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

    /// An epoch of one process on the embedded digits: as accurate as on this host, but for rounding.
    fn training(&self, checkout: &Checkout) -> Result<()> {
        let emulated = self.build("fashion_mnist", "fashion_mnist")?;
        let host = ["build", "-p", "fashion_mnist"];
        ensure!(self.cargo.run(&host)?.success(), "the example could not be built for this host");
        let here = Workspace::of(checkout)?.target.join("debug/fashion_mnist");
        // oneDNN compiles kernels in each step, which takes the emulator seconds.
        let arguments = ["--data", "digits", "--epochs", "1", "--batch-size", "256"];
        let here = accuracy(Command::new(&here).args(arguments).current_dir(checkout.root()))?;
        let emulated = accuracy(self.emulator(checkout).arg(&emulated).args(arguments))?;
        eprintln!("accuracy on aarch64 {emulated:.2} %, here {here:.2} %");
        ensure!(
            (emulated - here).abs() < ROUNDING_PERCENT && here > CHANCE_PERCENT,
            "the accuracy differs by more than {ROUNDING_PERCENT} %, or nothing was learned"
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
        let mut command = Command::new(EMULATOR);
        command.args(["-cpu", PROCESSOR, "-L"]).arg(self.root.path()).current_dir(checkout.root());
        if let Some(libtorch) = &self.libtorch {
            // For the emulated processor's loader alone.
            let mut variable = OsStr::new("LD_LIBRARY_PATH=").to_owned();
            variable.push(libtorch.folder().join("lib"));
            command.arg("-E").arg(variable);
        }
        command
    }
}

/// Makes the folder in which the emulator looks for absolute paths first: aarch64's system libraries, and the files by
/// which libtorch's libraries recognise a processor. Those of this host are of another kind, at which cpuinfo crashes.
fn emulated_root() -> Result<TempDir> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let make = || -> io::Result<()> {
        symlink(SYSTEM, folder.path().join("lib"))?;
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(path, text)
        };
        let count = thread::available_parallelism().map_or(1, usize::from);
        let entries = (0..count).map(|it| format!("processor\t: {it}\n{CPUINFO}\n"));
        write("proc/cpuinfo", &entries.collect::<String>())?;
        (0..count).try_for_each(|it| {
            write(&format!("sys/devices/system/cpu/cpu{it}/regs/identification/midr_el1"), MIDR)
        })
    };
    make().context("cannot write the emulator's folder")?;
    Ok(folder)
}

/// The accuracy of the last epoch that a training prints.
fn accuracy(command: &mut Command) -> Result<f64> {
    eprintln!("$ {}", cargo::line(command));
    // More threads than processors would wait for each other.
    let output = output(command.env("OMP_NUM_THREADS", "1"))?;
    let percent = text(&output.stdout).lines().filter_map(demo::accuracy_percent).next_back();
    percent.context("the training printed no line `epoch E/N, accuracy = ...`")
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

const EMULATOR: &str = "qemu-aarch64-static";

/// The system libraries of aarch64, from Debian's package of the compiler.
const SYSTEM: &str = "/usr/aarch64-linux-gnu/lib";

/// The processor that is emulated, as qemu, `/proc/cpuinfo` and its identification register name it.
const PROCESSOR: &str = "neoverse-n1";
const MIDR: &str = "0x00000000413fd0c1\n";
const CPUINFO: &str = "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm \
                       lrcpc dcpop asimddp ssbs\nCPU implementer\t: 0x41\nCPU architecture: 8\n\
                       CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n";

/// By how much two processors' accuracies after one epoch may differ.
const ROUNDING_PERCENT: f64 = 5.0;

/// Ten classes: a network that has learned nothing is right about one time in ten.
const CHANCE_PERCENT: f64 = 30.0;
