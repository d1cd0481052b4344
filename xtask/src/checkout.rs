//! Where things lie in this checkout.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The checkout that `cargo xtask` was called in.
#[derive(Debug)]
pub(crate) struct Checkout {
    root: PathBuf,
}

impl Checkout {
    /// Cargo names the folder of xtask in the environment of what it runs; the one known at build
    /// time serves when the program is started directly. The first wins: a checkout that was moved
    /// with its target folder still works.
    pub(crate) fn find() -> Result<Self> {
        let xtask = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = xtask.parent().context("xtask lies in no checkout")?;
        Ok(Self { root: root.to_path_buf() })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A path as the user would write it from the root.
    pub(crate) fn relative<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.root).unwrap_or(path)
    }
}
