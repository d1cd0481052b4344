//! A libtorch that the user names: LIBTORCH=<folder> or LIBTORCH_USE_PYTORCH=1.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::python;
use crate::checkout::Checkout;

/// A libtorch of the user's that was looked at and can be built with.
#[derive(Debug)]
pub(crate) struct Given {
    /// As the user set it, for messages: "LIBTORCH=<folder>".
    variable: String,
    library_folder: PathBuf,
    version: String,
    /// libtorch/ is there too, and .cargo/libtorch.toml speaks of that one.
    beside_fetched: bool,
}

impl Given {
    /// `None` when the environment names none, or only what setup itself made cargo put there.
    ///
    /// # Errors
    /// The folder is no libtorch, or of a version that Brigade cannot be built with.
    pub(crate) fn from_environment(checkout: &Checkout) -> Result<Option<Self>> {
        // tch's order: PyTorch's libtorch wins over LIBTORCH, and any value means yes.
        let (variable, folder) = if env::var_os("LIBTORCH_USE_PYTORCH").is_some() {
            ("LIBTORCH_USE_PYTORCH".to_owned(), python::pytorch_folder()?)
        } else {
            let Some(folder) = env::var_os("LIBTORCH").map(PathBuf::from) else { return Ok(None) };
            if is_fetched(checkout, &folder) {
                return Ok(None);
            }
            (format!("LIBTORCH={}", folder.display()), folder)
        };
        let version = validate(&variable, &folder)?;
        let beside_fetched = checkout.libtorch().exists();
        Ok(Some(Self { variable, library_folder: folder.join("lib"), version, beside_fetched }))
    }

    pub(crate) fn library_folder(&self) -> &Path {
        &self.library_folder
    }

    /// tch's build script accepts one version; Brigade is written for a range.
    pub(crate) fn bypasses_version_check(&self) -> bool {
        self.version != TCH_VERSION
    }

    pub(crate) fn announce(&self, checkout: &Checkout) {
        eprintln!("{}: libtorch {}, nothing is fetched", self.variable, self.version);
        if self.bypasses_version_check() {
            eprintln!(
                "note: the tch in Cargo.lock is made for libtorch {TCH_VERSION}; where it fails to \
                 build with {}, `cargo update -p tch --precise 0.24.0` takes the one for 2.11",
                self.version
            );
        }
        if self.beside_fetched {
            let fetched = checkout.libtorch();
            eprintln!(
                "note: {} is there too, and doc tests that plain cargo runs load that one; \
                 remove it where the variable is to stay",
                checkout.relative(&fetched).display()
            );
        }
    }

    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        // .cargo/libtorch.toml says all of this, unless it speaks of the fetched one.
        if !self.beside_fetched {
            return Vec::new();
        }
        let mut flags = env::var_os("RUSTDOCFLAGS").unwrap_or_default();
        flags.push(" -C link-arg=-Wl,-rpath,");
        flags.push(&self.library_folder);
        let mut environment = vec![("RUSTDOCFLAGS", flags)];
        if self.bypasses_version_check() {
            environment.push(("LIBTORCH_BYPASS_VERSION_CHECK", "1".into()));
        }
        environment
    }
}

/// Whether LIBTORCH is only what cargo read in .cargo/libtorch.toml. The checkout may be reached
/// by two names, and its libtorch/ may be gone, so the roots are compared.
fn is_fetched(checkout: &Checkout, folder: &Path) -> bool {
    if folder == checkout.libtorch_torch() {
        return true;
    }
    let root = folder.parent().and_then(Path::parent);
    let same_root = match (root.map(Path::canonicalize), checkout.root().canonicalize()) {
        (Some(Ok(named)), Ok(ours)) => named == ours,
        _ => false,
    };
    same_root && folder.ends_with("libtorch/torch")
}

/// The version of the libtorch in this folder.
fn validate(variable: &str, folder: &Path) -> Result<String> {
    if folder.as_os_str().is_empty() {
        bail!("LIBTORCH is set to nothing: unset it to have libtorch fetched, or name a folder");
    }
    if folder.is_relative() {
        bail!("{variable} is a relative path, and build scripts run elsewhere: make it absolute");
    }
    if !folder.is_dir() {
        bail!("{variable} names no folder: correct it, or unset it to have libtorch fetched");
    }
    for part in ["lib/libtorch_cpu.so", "include"] {
        if !folder.join(part).exists() {
            bail!(
                "{variable} has no {part}: name the folder of libtorch that has lib/ and include/"
            );
        }
    }
    let version = version_of(folder).with_context(|| {
        format!("{variable} has no readable version: neither build-version nor version.py")
    })?;
    if !is_supported(&version) {
        bail!(
            "{variable} is libtorch {version}, and Brigade is built with {OLDEST} to {NEWEST}: \
             name another, or unset it to have {TCH_VERSION} fetched"
        );
    }
    Ok(version)
}

/// "2.13.0" of a download of libtorch (build-version) or of PyTorch's package (version.py).
fn version_of(folder: &Path) -> Option<String> {
    let full = match fs::read_to_string(folder.join("build-version")) {
        Ok(text) => text.trim().to_owned(),
        Err(_) => {
            let text = fs::read_to_string(folder.join("version.py")).ok()?;
            let line = text.lines().find(|line| line.starts_with("__version__"))?;
            line.split(['\'', '"']).nth(1)?.to_owned()
        }
    };
    // "2.13.0+cu130": what it was built for is no part of the version.
    let version = full.split('+').next()?;
    (!version.is_empty()).then(|| version.to_owned())
}

fn is_supported(version: &str) -> bool {
    let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) => (2, 11) <= (major, minor) && (major, minor) <= (2, 13),
        _ => false,
    }
}

const OLDEST: &str = "2.11";
const NEWEST: &str = "2.13";
/// The one version that the build script of the tch in Cargo.lock accepts unasked.
const TCH_VERSION: &str = "2.13.0";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_versions() {
        for version in ["2.11.0", "2.12.1", "2.13.0", "2.13.0a0"] {
            assert!(is_supported(version), "{version}");
        }
        for version in ["2.10.1", "2.14.0", "1.13.0", "3.0.0", "2", "", "nightly"] {
            assert!(!is_supported(version), "{version}");
        }
    }
}
