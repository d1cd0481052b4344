//! `brigade test`: the self-test, started as any other program.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// The program that the self-test is, beside this one.
pub(crate) fn program(given: Option<&Path>) -> anyhow::Result<OsString> {
    if let Some(path) = given {
        return Ok(path.as_os_str().to_owned());
    }
    let this = std::env::current_exe().context("cannot find this program's own file")?;
    let beside: PathBuf = this.with_file_name(NAME);
    if beside.is_file() {
        return Ok(beside.into_os_string());
    }
    bail!(
        "{} is not there: build it with `cargo build -p {NAME}` (and --release, as this program), \
         or name it with --program",
        beside.display()
    )
}

const NAME: &str = "brigade-selftest";
