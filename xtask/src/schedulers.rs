//! `cargo xtask schedulers`: the real schedulers that tests start, from Debian's packages.
//!
//! Nothing is started: the tests run their own in namespaces of their own.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::cargo;

/// A program that the tests need, and the package that it is from.
const NEEDED: [(&str, &str); 6] = [
    ("slurmctld", "slurm-wlm"),
    ("slurmd", "slurm-wlm"),
    ("srun", "slurm-wlm"),
    ("munged", "munge"),
    ("mpirun", "openmpi-bin"),
    ("ip", "iproute2"),
];

/// Installs what is missing and says what is there.
pub(crate) fn run() -> Result<ExitCode> {
    let mut packages: Vec<&str> = NEEDED
        .iter()
        .filter(|(program, _)| !is_there(program))
        .map(|(_, package)| *package)
        .collect();
    packages.dedup();
    if !packages.is_empty() {
        install(&packages)?;
        if let Some((program, package)) = NEEDED.iter().find(|(program, _)| !is_there(program)) {
            bail!("{package} is installed, but there is no {program}");
        }
    }
    for (program, argument) in [("slurmd", "-V"), ("munged", "-V"), ("mpirun", "--version")] {
        let output = Command::new(program).arg(argument).output();
        let output = output.with_context(|| format!("cannot start {program}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        eprintln!("{}", text.lines().next().unwrap_or(program));
    }
    eprintln!("the schedulers are there; `cargo test -p brigade-cli --test schedulers` uses them");
    Ok(ExitCode::SUCCESS)
}

/// Daemons may be in folders that only root's PATH has.
fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.into_iter().any(|folder| folder.join(program).is_file())
}

fn install(packages: &[&str]) -> Result<()> {
    let line = format!("apt-get install --no-install-recommends {}", packages.join(" "));
    if !is_there("apt-get") {
        bail!("no apt-get here: install by hand what `{line}` would on Debian");
    }
    let id = Command::new("id").arg("-u").output().context("cannot start id")?;
    if id.stdout.trim_ascii() != b"0" {
        bail!("only root can install packages: run `sudo {line}`");
    }
    let _guard = NoServices::begin()?;
    apt(&["update", "--quiet"])?;
    apt(&[&["install", "--yes", "--quiet", "--no-install-recommends"], packages].concat())
}

fn apt(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
    if !cargo::run(&mut command)?.success() {
        bail!("apt-get failed");
    }
    Ok(())
}

/// While it lives, packages that are installed do not start their services. Debian asks this file;
/// one that is there already belongs to whoever set the machine up, and stays.
struct NoServices {
    ours: bool,
}

impl NoServices {
    fn begin() -> Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o755).open(POLICY);
        match file {
            Ok(mut file) => {
                let guard = Self { ours: true };
                let forbid =
                    b"#!/bin/sh\n# No services while cargo xtask schedulers runs.\nexit 101\n";
                file.write_all(forbid).with_context(|| format!("cannot write {POLICY}"))?;
                Ok(guard)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(Self { ours: false }),
            Err(error) => Err(error).with_context(|| format!("cannot write {POLICY}")),
        }
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = fs::remove_file(Path::new(POLICY))
        {
            eprintln!(
                "warning: cannot remove {POLICY}, which keeps services from starting: {error}"
            );
        }
    }
}

const POLICY: &str = "/usr/sbin/policy-rc.d";
