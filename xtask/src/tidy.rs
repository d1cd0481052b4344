//! `cargo xtask tidy`: checks the invariants of ARCHITECTURE.md.

mod accelerator;
mod architecture;
mod circles;
mod crates;
mod docs;
mod front;
mod harness;
mod reexports;
mod source;
mod text;
mod waits;

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::checkout::Checkout;

/// Lists every violation with its place and its remedy. Fails if there is one. With `write`, first writes the generated
/// tables anew.
pub(crate) fn run(checkout: &Checkout, write: bool) -> Result<ExitCode> {
    let mut findings = Findings::default();
    crates::check(checkout, &mut findings)?;
    architecture::check(checkout, write, &mut findings)?;
    let (mut sources, mut manifests) = (Vec::new(), Vec::new());
    for path in tracked_files(checkout)? {
        // Git may list a file that was just deleted, and some files are not text.
        let Ok(contents) = fs::read_to_string(checkout.root().join(&path)) else { continue };
        text::check(&path, &contents, &mut findings);
        if Path::new(&path).extension().is_some_and(|it| it == "rs") {
            source::check(&path, &contents, &mut findings);
            docs::check(&path, &contents, &mut findings);
            sources.push((path, contents));
        } else if path.ends_with("Cargo.toml") {
            manifests.push((path, contents));
        }
    }
    for (path, manifest) in &manifests {
        harness::check(path, manifest, &sources, &mut findings);
    }

    accelerator::check(&sources, &mut findings);
    circles::check(&sources, &mut findings);
    reexports::check(&sources, &mut findings);
    waits::check(checkout, &mut findings)?;
    front::check(checkout, &mut findings)?;
    for note in &findings.notes {
        eprintln!("note: {note}");
    }
    for violation in &findings.violations {
        eprintln!("tidy: {violation}");
    }
    if findings.violations.is_empty() {
        eprintln!("tidy: all is well");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("tidy: {} violations", findings.violations.len());
    Ok(ExitCode::FAILURE)
}

/// Findings of the checks, as lines that begin with the place.
#[derive(Debug, Default)]
struct Findings {
    violations: Vec<String>,
    /// Notes, which are not errors.
    notes: Vec<String>,
}

/// Returns the files of the checkout that git tracks or would add, by their path from the root.
fn tracked_files(checkout: &Checkout) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(checkout.root())
        .output()
        .context("cannot start git, which lists the files to check")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("git cannot list the files of this checkout: {}", reason.trim());
    }
    let names = String::from_utf8_lossy(&output.stdout);
    Ok(names.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}
