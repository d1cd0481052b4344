//! .cargo/libtorch.toml: how plain cargo commands learn where libtorch lies.
//!
//! Build scripts set the run path of programs and tests, but not that of doc tests, which only
//! `rustdocflags` reaches. Those do not count when cargo decides what to build anew, so writing the
//! file after xtask itself was built costs nothing.

use std::fs;
use std::path::Path;
use std::process;

use anyhow::{Context, Result};

use super::given::Given;
use crate::checkout::Checkout;

/// For the libtorch in this checkout.
pub(crate) fn for_fetched(checkout: &Checkout) -> Result<String> {
    let run_path = run_path_flag(&checkout.libtorch_torch().join("lib"))?;
    Ok(format!(
        "{HEADER}[env]\nLIBTORCH = {{ value = \"libtorch/torch\", relative = true }}\n\n\
         [build]\nrustdocflags = [\"-C\", {run_path}]\n"
    ))
}

/// For a libtorch that the user names in the environment: cargo sees that variable itself.
pub(crate) fn for_given(given: &Given) -> Result<String> {
    let run_path = run_path_flag(given.library_folder())?;
    let bypass = if given.bypasses_version_check() {
        "[env]\nLIBTORCH_BYPASS_VERSION_CHECK = \"1\"\n\n"
    } else {
        ""
    };
    Ok(format!("{HEADER}{bypass}[build]\nrustdocflags = [\"-C\", {run_path}]\n"))
}

/// Writes it whole or not at all, and only when it changes.
pub(crate) fn write(checkout: &Checkout, text: &str) -> Result<()> {
    let path = checkout.root().join(".cargo/libtorch.toml");
    if fs::read_to_string(&path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    // Beside libtorch/, where git ignores the name.
    let unfinished = checkout.root().join(format!("libtorch.toml.{}", process::id()));
    fs::write(&unfinished, text)
        .and_then(|()| fs::rename(&unfinished, &path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The flag as a TOML string. JSON's strings are TOML's too.
fn run_path_flag(folder: &Path) -> Result<String> {
    let folder = folder.to_str().with_context(|| format!("{} is not UTF-8", folder.display()))?;
    Ok(serde_json::to_string(&format!("link-arg=-Wl,-rpath,{folder}"))?)
}

const HEADER: &str = "# Written by `cargo xtask setup`; do not edit.\n";
