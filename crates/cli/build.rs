//! Gives the program the commit and the target that `brigade --version` prints.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={COMMIT}");
    let commit = variable(COMMIT);
    let commit = if commit.is_empty() { published().or_else(checked_out) } else { Some(commit) };
    let commit = commit.map(|it| format!("commit {it:.12}, ")).unwrap_or_default();
    // Cargo passes it to what it runs, where the launcher takes variables that begin with BRIGADE_ for settings.
    println!("cargo::rustc-env=LAUNCHER_BUILD={commit}{}", variable("TARGET"));
}

/// The commit that `cargo publish` notes in the package.
fn published() -> Option<String> {
    let note = fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let (_, rest) = note.split_once("\"sha1\"")?;
    rest.split('"').nth(1).map(str::to_owned)
}

/// The checkout's commit, in builds that are meant for use: those for development would be linked again after each
/// commit.
fn checked_out() -> Option<String> {
    if variable("PROFILE") != "release" || !Path::new("../../.git").exists() {
        return None;
    }
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let head = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
    if Path::new(&head).exists() {
        println!("cargo::rerun-if-changed={head}");
    }
    git(&["rev-parse", "HEAD"])
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}

/// Names the commit where there is no repository: in a build from an archive of the sources.
const COMMIT: &str = "BRIGADE_COMMIT";
