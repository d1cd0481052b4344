//! `cargo xtask check`: all lints, cheapest first, warnings as errors.

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::docs::{document, document_all};
use crate::tidy;
use crate::workspace::Workspace;

/// Runs every lint, also after one failed, and names those that failed.
pub(crate) fn run(checkout: &Checkout) -> Result<ExitCode> {
    let cargo = Cargo::new(checkout)?;
    let mut lints = Lints::default();
    lints.run(FMT, || Ok(cargo.run(&["fmt", "--all", "--check"])?.success()))?;
    lints.run("tidy", || Ok(tidy::run(checkout, false)? == ExitCode::SUCCESS))?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    lints.run("clippy", || Ok(cargo.run(&clippy)?.success()))?;
    lints.run("doc", || Ok(cargo::run(&mut document_all(&cargo))?.success()))?;
    lints.run("package (what crates.io would refuse)", || Ok(cargo.run(&PACKAGE)?.success()))?;
    lints.run("semver-checks", || semver_checks(checkout, &cargo))?;
    Ok(lints.conclude())
}

/// Lints some packages: what is checked of each file and crate, without the rules of the whole checkout.
pub(crate) fn run_on(checkout: &Checkout, packages: &[String]) -> Result<ExitCode> {
    let workspace = Workspace::of(checkout)?;
    let names: Option<Vec<&str>> =
        packages.iter().map(|it| workspace.named(it).map(|it| &*it.name)).collect();
    let Some(names) = names else {
        let wrong = packages.iter().find(|it| workspace.named(it).is_none());
        bail!("{} is no package of this workspace", wrong.map_or("", |it| it));
    };
    let cargo = Cargo::new(checkout)?;
    let options: Vec<&str> = names.iter().flat_map(|it| ["-p", *it]).collect();
    let mut lints = Lints::default();
    let with = |command: &[&str], rest: &[&str]| {
        cargo.run(&[command, &options, rest].concat()).map(|it| it.success())
    };
    lints.run(FMT, || with(&["fmt"], &["--check"]))?;
    lints.run("clippy", || with(&["clippy", "--all-targets"], &["--", "-D", "warnings"]))?;
    let has_library = |name: &&str| workspace.package(name).is_some_and(|it| it.has_library);
    let libraries: Vec<&str> = names.iter().copied().filter(has_library).collect();
    if !libraries.is_empty() {
        let mut document = document(&cargo, &["doc", "--lib", "--no-deps"]);
        document.args(libraries.iter().flat_map(|it| ["-p", *it]));
        lints.run("doc", || Ok(cargo::run(&mut document)?.success()))?;
    }
    Ok(lints.conclude())
}

const FMT: &str = "fmt (run `cargo fmt --all`)";

/// The lints that ran.
#[derive(Default)]
struct Lints {
    failed: Vec<&'static str>,
    /// Each with its seconds.
    times: Vec<String>,
}

impl Lints {
    fn run(&mut self, name: &'static str, lint: impl FnOnce() -> Result<bool>) -> Result<()> {
        let started = Instant::now();
        if !lint()? {
            self.failed.push(name);
        }
        let word = name.split(' ').next().unwrap_or(name);
        self.times.push(format!("{word} {} s", started.elapsed().as_secs()));
        Ok(())
    }

    fn conclude(&self) -> ExitCode {
        eprintln!("time: {}", self.times.join(", "));
        if self.failed.is_empty() {
            eprintln!("check: all is well");
            return ExitCode::SUCCESS;
        }
        eprintln!("check: failed: {}", self.failed.join(", "));
        ExitCode::FAILURE
    }
}

/// Compares the public API with that of the last release, where cargo-semver-checks is installed and there is
/// a release; a change that breaks users needs another version then.
fn semver_checks(checkout: &Checkout, cargo: &Cargo<'_>) -> Result<bool> {
    let installed = cargo.command(&["semver-checks", "--version"]).output()?;
    if !installed.status.success() {
        eprintln!("semver-checks: left out (`cargo install cargo-semver-checks` installs it)");
        return Ok(true);
    }
    let mut describe = Command::new("git");
    describe.args(["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]);
    let tag = describe.current_dir(checkout.root()).output().context("cannot start git")?;
    let tag = String::from_utf8_lossy(&tag.stdout).trim().to_owned();
    if tag.is_empty() {
        eprintln!("semver-checks: left out: no tag v* names a release to compare with");
        return Ok(true);
    }
    let arguments = ["semver-checks", "--workspace", "--baseline-rev", &tag];
    Ok(cargo.run(&arguments)?.success())
}

/// Checks what a crate needs to be published and packs it. Whether the packed crates compile, without files
/// outside of them, is the same command without `--no-verify`: another build of everything.
const PACKAGE: [&str; 6] =
    ["publish", "--quiet", "--workspace", "--dry-run", "--no-verify", "--allow-dirty"];
