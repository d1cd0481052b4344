//! Git as a child process.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::checkout::Checkout;

/// Runs `git ARGUMENTS…` in the checkout's root, and returns its output without the last line break.
///
/// # Errors
/// Fails with Git's message if Git is missing or fails.
pub(crate) fn git(checkout: &Checkout, arguments: &[&str]) -> Result<String> {
    let mut git = Command::new("git");
    git.args(arguments).current_dir(checkout.root());
    let output = git.output().context("cannot start git")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("git {} failed: {}", arguments.join(" "), reason.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}
