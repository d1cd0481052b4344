//! Cache of fetched libtorch installations: a folder of the user's that all projects share.

use std::env::{self, consts};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::pins::{Kind, Pins};

/// Folder of fetched libtorch installations: `$XDG_CACHE_HOME/brigade/libtorch`, by default in `~/.cache`.
///
/// Each version and kind has a subfolder of its own, such as `2.13.0-cpu`, so that projects can use different versions.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Returns the user's cache. Creates no files.
    ///
    /// # Errors
    /// Fails if the user has no home folder and `XDG_CACHE_HOME` is not set to an absolute path.
    pub fn of_user() -> Result<Self> {
        let cache = of_brigade().context(
            "there is no folder for libtorch: this user has no home folder; set XDG_CACHE_HOME to an \
             absolute path, or LIBTORCH to an installed libtorch",
        )?;
        Ok(Self::at(cache.join("libtorch")))
    }

    /// Returns a cache in this folder.
    #[must_use]
    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// Returns the folder of the cache.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns `true` if this folder is the place of a libtorch installation in the cache. It need not exist.
    #[must_use]
    pub fn contains(&self, folder: &Path) -> bool {
        folder.starts_with(&self.root)
    }

    /// Returns the folder of one version and kind, with `torch/` and `nvidia/` side by side, as libtorch's own run path
    /// expects.
    pub(crate) fn install(&self, pins: &Pins, kind: Kind) -> PathBuf {
        let mut name = format!("{}-{}", pins.libtorch_version(), kind.name());
        if let Some(other) = pins.architecture.as_deref().filter(|it| *it != consts::ARCH) {
            name = format!("{name}-{other}");
        }
        self.root.join(name)
    }
}

/// Returns the folder of all of Brigade's caches of this user; `None` if the user has no home folder.
pub(crate) fn of_brigade() -> Option<PathBuf> {
    // A relative path in the variable is ignored (XDG base directory specification).
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
    Some(cache.or_else(|| Some(env::home_dir()?.join(".cache")))?.join("brigade"))
}
