//! `cargo xtask bench`: runs the package brigade-bench, with peers to compare with where asked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::setup;

/// Benchmarks find the peers' Python in BRIGADE_PEER_PYTHON; without it they skip the comparison.
pub(crate) fn run(checkout: &Checkout, peers: bool, arguments: &[String]) -> Result<ExitCode> {
    let libtorch = setup::ensure(checkout)?;
    let environment = Peers::new(checkout);
    if peers {
        environment.install()?;
    }
    let mut command =
        Cargo::new(checkout, &libtorch).command(&["run", "--release", "-p", "brigade-bench", "--"]);
    command.args(arguments);
    if environment.is_installed() {
        command.env("BRIGADE_PEER_PYTHON", environment.python());
    } else {
        eprintln!("note: no peers; `cargo xtask bench --peers` installs PyTorch to compare with");
    }
    Ok(cargo::exit_code(cargo::run(&mut command)?))
}

/// peers/: a virtual environment of Python with what Brigade is measured against.
struct Peers {
    folder: PathBuf,
}

impl Peers {
    fn new(checkout: &Checkout) -> Self {
        Self { folder: checkout.root().join("peers") }
    }

    fn python(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    fn stamp(&self) -> PathBuf {
        self.folder.join("VERSION")
    }

    /// The stamp is written last, so an interrupted installation does not count.
    fn is_installed(&self) -> bool {
        fs::read_to_string(self.stamp()).is_ok_and(|found| found == PACKAGES.join("\n"))
    }

    fn install(&self) -> Result<()> {
        if self.is_installed() {
            return Ok(());
        }
        // Virtual environments name their own folder, so this one is made in its place.
        match fs::remove_dir_all(&self.folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error)
                    .with_context(|| format!("cannot remove {}", self.folder.display()));
            }
            _ => {}
        }
        let mut create = Command::new("python3");
        create.args(["-m", "venv"]).arg(&self.folder);
        step(
            &mut create,
            "python3 cannot make a virtual environment: install its module venv (on Debian and \
             Ubuntu: apt install python3-venv)",
        )?;
        let mut pip = Command::new(self.python());
        pip.args(["-m", "pip", "install", "--no-input", "--only-binary=:all:"]).args(PACKAGES);
        step(
            &mut pip,
            "pip cannot install the peers: its last lines say why; the benchmarks also run without \
             them",
        )?;
        let stamp = self.stamp();
        fs::write(&stamp, PACKAGES.join("\n"))
            .with_context(|| format!("cannot write {}", stamp.display()))
    }
}

fn step(command: &mut Command, advice: &str) -> Result<()> {
    if cargo::run(command).is_ok_and(|status| status.success()) {
        return Ok(());
    }
    let program = Path::new(command.get_program()).display().to_string();
    bail!("{advice} ({program} failed)")
}

/// PyTorch is the libtorch of this checkout, so a ratio compares loops and not kernels.
const PACKAGES: &[&str] = &["torch==2.13.0", "accelerate==1.15.0", "torchvision==0.28.0", "numpy"];
