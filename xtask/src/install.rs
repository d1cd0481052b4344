//! `cargo xtask install`: installs what tests and the book need besides Rust, from Debian's packages, Python's and
//! cargo.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use brigade_libtorch_setup::{Pins, TpuFiles, TpuPlugin};
use brigade_test_needs::{Need, installed, is_root, needs_named};

use crate::checkout::Checkout;
use crate::docs::MdBook;
use crate::notebook;
use crate::python_environment::Environment;
use crate::semver::SemverChecks;
use crate::setup;

/// Installs what these names stand for; without names, everything that is in packages of the system. Fails if something
/// is still missing for tests. `pins` replaces the pinned wheels of TorchTPU.
pub(crate) fn run(checkout: &Checkout, names: &[String], pins: Option<&Path>) -> Result<ExitCode> {
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
        if *need == Need::Tpu {
            let pins = pins.map_or_else(Pins::embedded, Pins::read)?;
            let libtorch = setup::ensure(checkout)?;
            TpuFiles::find_or_fetch(TpuPlugin::Cpu, libtorch.version(), &pins)?;
        }
        if *need == Need::SemverChecks && need.lacking().is_some() {
            SemverChecks::install(checkout)?;
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

/// Before all tests: installs missing packages if this user may, or if the user agrees when the package manager asks.
/// What is still missing is listed after the tests.
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

/// Returns the packages whose programs are missing.
fn missing(needs: &[Need]) -> Vec<&'static str> {
    let all = needs.iter().flat_map(|need| need.packages());
    let mut missing: Vec<&str> =
        all.filter(|it| installed(it.program).is_none()).map(|it| it.package).collect();
    missing.sort_unstable();
    missing.dedup();
    missing
}

/// Runs apt: as root without a question, for other users with the prompts of sudo and apt.
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

/// Name of the needs of `cargo xtask docs`.
const BOOK: &str = "docs";
/// Needs that are in packages of the system.
const PACKAGED: [Need; 5] = [Need::Hosts, Need::Etcd, Need::Slurm, Need::OpenMpi, Need::Python];
const APT: &str = "apt-get";
/// Script that installs its arguments, and starts no service of them, neither now (Debian calls policy-rc.d, which is
/// kept if a user has one) nor at boot.
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
    fn every_need_with_packages_is_offered_but_what_only_cross_and_slow_tests_need() {
        for need in Need::ALL {
            let is_for_packages =
                [Need::Arm64, Need::Arm64Package, Need::FreshSystem].contains(&need);
            let is_offered = !need.packages().is_empty() && !is_for_packages;
            assert_eq!(PACKAGED.contains(&need), is_offered, "{need}");
        }
    }

    #[test]
    fn the_script_is_one_of_the_shell() {
        let status = Command::new("sh").args(["-nc", SCRIPT]).status().unwrap();
        assert!(status.success());
    }
}
