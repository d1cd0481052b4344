//! Selection of the libtorch to build with: the fetched one, a folder that the user names, or Python's.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::fetch;
use crate::install::{self, State};
use crate::pins::{Kind, Pins};
use crate::python;

/// Libtorch that the user asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The pinned version, fetched into the cache if it is missing.
    Fetched(Kind),
    /// A folder with `lib/` and `include/`.
    Folder {
        /// Absolute path of the folder.
        path: PathBuf,
        /// Setting by which the user named the folder, for messages: `LIBTORCH=/opt/libtorch`.
        named: String,
    },
    /// The PyTorch package of a Python.
    PyTorch {
        /// Setting by which the user chose it, for messages: `--pytorch`.
        named: String,
        /// Path of the interpreter. Defaults to the one that tch's build script uses: `python` in `PATH` in an active
        /// virtual environment, else `python3` in `PATH`.
        python: Option<PathBuf>,
    },
}

impl Wanted {
    /// Reads the choice from the environment, by the rules of tch's build script: `LIBTORCH_USE_PYTORCH` with any
    /// value, or else `LIBTORCH`. Returns `None` if neither is set.
    #[must_use]
    pub fn by_environment() -> Option<Self> {
        if env::var_os(LIBTORCH_USE_PYTORCH).is_some() {
            let named = LIBTORCH_USE_PYTORCH.to_owned();
            return Some(Self::PyTorch { named, python: None });
        }
        let path = PathBuf::from(env::var_os(LIBTORCH)?);
        let named = format!("{LIBTORCH}={}", path.display());
        Some(Self::Folder { path, named })
    }
}

/// Installation of libtorch that was validated and can be built with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libtorch {
    folder: PathBuf,
    version: String,
    origin: Origin,
}

/// Origin of a libtorch installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Fetched into the cache.
    Fetched(Kind),
    /// Named by the user. Contains the setting, for messages.
    Named(String),
}

impl Libtorch {
    /// Validates the requested libtorch, and fetches it if it is the pinned one and not in the cache. If it is in the
    /// cache, this takes microseconds. A CUDA installation is also used when a CPU one is requested.
    ///
    /// # Errors
    /// Fails if the folder has no libtorch, or one of an unsupported version; or if Python with pip, the network or
    /// disk space is missing, or a checksum is wrong.
    pub fn find_or_fetch(wanted: &Wanted, cache: &Cache, pins: &Pins) -> Result<Self> {
        match wanted {
            Wanted::Fetched(kind) => Self::fetched(*kind, cache, pins),
            Wanted::Folder { path, named } => Self::named(path.clone(), named),
            Wanted::PyTorch { named, python } => {
                Self::named(python::pytorch_folder(named, python.as_deref())?, named)
            }
        }
    }

    fn fetched(kind: Kind, cache: &Cache, pins: &Pins) -> Result<Self> {
        if let Some(found) = Self::find_fetched(kind, cache, pins)? {
            return Ok(found);
        }
        if kind == Kind::Cpu
            && let Ok(Some(found)) = Self::find_fetched(Kind::Cuda, cache, pins)
        {
            return Ok(found);
        }
        pins.check_host(kind)?;
        fetch::fetch(cache.root(), &cache.install(pins, kind), &pins.contents(kind))?;
        Ok(Self {
            folder: cache.install(pins, kind).join("torch"),
            version: pins.libtorch_version().to_owned(),
            origin: Origin::Fetched(kind),
        })
    }

    /// Returns the pinned libtorch if it is in the cache. Fetches nothing.
    ///
    /// # Errors
    /// Fails if the folder in the cache holds something else.
    pub fn find_fetched(kind: Kind, cache: &Cache, pins: &Pins) -> Result<Option<Self>> {
        let place = cache.install(pins, kind);
        let is_ready = install::state(&place, &pins.contents(kind))? == State::Ready;
        Ok(is_ready.then(|| Self {
            folder: place.join("torch"),
            version: pins.libtorch_version().to_owned(),
            origin: Origin::Fetched(kind),
        }))
    }

    fn named(folder: PathBuf, named: &str) -> Result<Self> {
        let version = validate(named, &folder)?;
        Ok(Self { folder, version, origin: Origin::Named(named.to_owned()) })
    }

    /// Returns the folder with `lib/` and `include/`, as `LIBTORCH` names it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns NVRTC, the compiler of GPU kernels that a libtorch for CUDA brings.
    ///
    /// # Errors
    /// Fails if the installation has none, such as one for CPUs.
    pub fn nvrtc(&self) -> Result<PathBuf> {
        nvrtc_of(&self.folder).with_context(|| {
            format!(
                "there is no libnvrtc.so in or beside {}: it is not for CUDA",
                self.folder.display()
            )
        })
    }

    /// Returns the version, such as `2.13.0`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the origin of the installation.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns `true` if tch's build script must be configured to accept this version: by default it accepts only
    /// [`TCH_VERSION`], while Brigade supports a range.
    #[must_use]
    pub fn bypasses_version_check(&self) -> bool {
        self.version != TCH_VERSION
    }

    /// Describes the installation in one line, or in two lines if its version is not the one that tch was made for.
    #[must_use]
    pub fn description(&self) -> String {
        let mut text = match &self.origin {
            Origin::Fetched(kind) => {
                format!(
                    "libtorch {} ({}) is in {}",
                    self.version,
                    kind.name(),
                    self.folder.display()
                )
            }
            Origin::Named(named) => {
                format!(
                    "{named}: libtorch {} in {}, nothing is fetched",
                    self.version,
                    self.folder.display()
                )
            }
        };
        if self.bypasses_version_check() {
            text.push_str(&format!(
                "\nnote: tch is made for libtorch {TCH_VERSION}; where it fails to build with {}, `cargo \
                 update -p tch --precise 0.24.0` takes the one for 2.11",
                self.version
            ));
        }
        text
    }
}

/// Returns the NVRTC of the libtorch in this folder: in its `lib` or, as Python's packages have it, in a folder beside it.
#[must_use]
pub fn nvrtc_of(folder: &Path) -> Option<PathBuf> {
    let packages = folder.parent().map(|site| site.join("nvidia"));
    let packages = packages.and_then(|packages| fs::read_dir(packages).ok()).into_iter().flatten();
    let beside = packages.flatten().map(|package| package.path().join("lib"));
    std::iter::once(folder.join("lib"))
        .chain(beside)
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()))
        .find(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            name.starts_with("libnvrtc.so")
        })
}

/// Returns the version of the libtorch in this folder, if it is supported.
fn validate(named: &str, folder: &Path) -> Result<String> {
    if folder.as_os_str().is_empty() {
        bail!("{named} is empty: unset it to have libtorch fetched, or name a folder");
    }
    if folder.is_relative() {
        bail!("{named} is a relative path, and build scripts run elsewhere: make it absolute");
    }
    if !folder.is_dir() {
        bail!("{named} is not a folder: correct it, or unset it to have libtorch fetched");
    }
    for part in ["lib/libtorch_cpu.so", "include"] {
        if !folder.join(part).exists() {
            bail!("{named} has no {part}: name the folder of libtorch that has lib/ and include/");
        }
    }
    let version = version_of(folder).with_context(|| {
        format!("{named} has no readable version: it has neither build-version nor version.py")
    })?;
    if !is_supported(&version) {
        bail!(
            "{named} is libtorch {version}, and Brigade is built with {OLDEST} to {NEWEST}: \
             name another, or unset it to have {TCH_VERSION} fetched"
        );
    }
    Ok(version)
}

/// Reads the version, such as "2.13.0", of a libtorch download (build-version) or of the PyTorch package (version.py).
fn version_of(folder: &Path) -> Option<String> {
    let full = match fs::read_to_string(folder.join("build-version")) {
        Ok(text) => text.trim().to_owned(),
        Err(_) => {
            let text = fs::read_to_string(folder.join("version.py")).ok()?;
            let line = text.lines().find(|line| line.starts_with("__version__"))?;
            line.split(['\'', '"']).nth(1)?.to_owned()
        }
    };
    // The part after `+` in "2.13.0+cu130" is not part of the version.
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

const LIBTORCH: &str = "LIBTORCH";
const LIBTORCH_USE_PYTORCH: &str = "LIBTORCH_USE_PYTORCH";
const OLDEST: &str = "2.11";
const NEWEST: &str = "2.13";
/// Version of libtorch that the build script of the tch in `Cargo.lock` accepts by default.
pub const TCH_VERSION: &str = "2.13.0";

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
