//! Interface to the local Python, which runs pip and unpacks wheels.
//!
//! Python inflates half a gigabyte in two seconds; a crate for it would be compiled without optimisation, before a new
//! user sees any output, and pip needs Python anyway.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::pins::Contents;

/// Facts that are checked before a fetch starts.
#[derive(Debug, Deserialize)]
pub(crate) struct Preflight {
    pub(crate) executable: String,
    /// Version of pip; `None` if Python has no pip.
    pub(crate) pip: Option<String>,
    /// Version of glibc; `None` with another C library.
    pub(crate) glibc: Option<(u32, u32)>,
    /// Free space on the disk of the requested folder.
    pub(crate) free_bytes: u64,
}

impl Preflight {
    pub(crate) fn of(folder: &Path, contents: &Contents<'_>) -> Result<Self> {
        let Contents { product, instead, .. } = contents;
        let needed_for = format!(
            "pip, which fetches {product}, needs it: install Python 3 with pip (on Debian and Ubuntu: apt install \
             python3-pip){instead}"
        );
        let mut python = Command::new(PYTHON);
        let output = output(python.args(["-c", PREFLIGHT]).arg(folder), &needed_for)?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("{PYTHON} gave no answer"))
    }
}

/// Returns the folder of the PyTorch that this Python imports, or, without one, of the PyTorch that tch's build script
/// would find.
pub(crate) fn pytorch_folder(named: &str, python: Option<&Path>) -> Result<PathBuf> {
    // Follows the rule of the build script for the choice of the Python.
    let default = if env::var_os("VIRTUAL_ENV").is_some() { "python" } else { PYTHON };
    let python = python.unwrap_or_else(|| Path::new(default));
    let needed_for =
        format!("{named} needs it: install it, or leave {named} out to have libtorch fetched");
    let output = output(Command::new(python).args(["-c", FIND_PYTORCH]), &needed_for)?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if folder.is_empty() {
        bail!(
            "{named}: {} has no package torch: install it, or leave {named} out to have libtorch \
             fetched",
            python.display()
        );
    }
    Ok(PathBuf::from(folder))
}

/// Runs Python. `needed_for` ends the message that it is missing.
fn output(command: &mut Command, needed_for: &str) -> Result<Output> {
    let python = command.get_program().to_string_lossy().into_owned();
    let output = match command.output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("{python} is missing, and {needed_for}")
        }
        other => other.with_context(|| format!("cannot start {python}"))?,
    };
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let reason = text.lines().last().unwrap_or("no output");
        bail!("{python} fails ({}): {reason}", output.status);
    }
    Ok(output)
}

pub(crate) const PYTHON: &str = "python3";

/// Script that unpacks a wheel. Its arguments are a wheel, the folder to unpack into, and a JSON list of the patterns
/// of files to keep. It prints the bytes written so far, one line every few megabytes.
pub(crate) const UNPACK: &str = include_str!("unpack.py");
/// Exit code of UNPACK when the disk is full: ENOSPC.
pub(crate) const UNPACK_DISK_FULL: i32 = 28;

const PREFLIGHT: &str = "\
import json, os, shutil, sys
try:
    import pip
    pip_version = pip.__version__
except ImportError:
    pip_version = None
try:
    name, version = os.confstr('CS_GNU_LIBC_VERSION').split()
    glibc = [int(part) for part in version.split('.')[:2]]
except (AttributeError, OSError, ValueError):
    glibc = None
print(json.dumps({
    'executable': sys.executable,
    'pip': pip_version,
    'glibc': glibc,
    'free_bytes': shutil.disk_usage(sys.argv[1]).free,
}))
";

/// Finds PyTorch without importing it, which takes seconds.
const FIND_PYTORCH: &str = "\
import importlib.util
spec = importlib.util.find_spec('torch')
if spec is not None and spec.submodule_search_locations:
    print(list(spec.submodule_search_locations)[0])
";
