//! Where fetched libtorchs lie: a folder of the user's, shared by all projects.

use std::env::{self, consts};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::pins::{Kind, Pins};

/// The folder for fetched libtorchs: `$XDG_CACHE_HOME/brigade/libtorch`, by default in `~/.cache`.
///
/// Each version and kind has a folder of its own in it, such as `2.13.0-cpu`, so that projects with
/// different versions do not get in each other's way.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Names the user's cache. Creates nothing.
    ///
    /// # Errors
    /// The user has no home folder, and `XDG_CACHE_HOME` names no other place.
    pub fn of_user() -> Result<Self> {
        // A relative path in the variable is to be ignored (XDG base directory specification).
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
        let cache = cache.or_else(|| Some(env::home_dir()?.join(".cache")));
        let cache = cache.context(
            "there is no folder for libtorch: this user has no home folder; set XDG_CACHE_HOME to an \
             absolute path, or LIBTORCH to an installed libtorch",
        )?;
        Ok(Self::at(cache.join("brigade").join("libtorch")))
    }

    /// A cache in this folder.
    #[must_use]
    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// The folder itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether this folder is, or would be, a libtorch in the cache.
    #[must_use]
    pub fn contains(&self, folder: &Path) -> bool {
        folder.starts_with(&self.root)
    }

    /// Where one version and kind lies: the folder with `torch/` and `nvidia/` side by side, as
    /// libtorch's own run path expects. One of another architecture has that in its name.
    pub(crate) fn install(&self, pins: &Pins, kind: Kind) -> PathBuf {
        let mut name = format!("{}-{}", pins.libtorch_version(), kind.name());
        if let Some(other) = pins.architecture.as_deref().filter(|it| *it != consts::ARCH) {
            name = format!("{name}-{other}");
        }
        self.root.join(name)
    }
}
