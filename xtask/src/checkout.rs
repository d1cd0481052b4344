//! Paths in this checkout.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Checkout in which `cargo xtask` was called.
#[derive(Debug)]
pub(crate) struct Checkout {
    root: PathBuf,
}

impl Checkout {
    /// Finds the checkout. Cargo sets the folder of xtask in the environment of programs that it runs; the folder at
    /// build time is the fallback if the program is started directly. The former takes precedence, so that a checkout
    /// that was moved with its target folder works.
    pub(crate) fn find() -> Result<Self> {
        let xtask = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = xtask.parent().context("xtask lies in no checkout")?;
        Ok(Self { root: root.to_path_buf() })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns a path relative to the root, for messages.
    pub(crate) fn relative<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.root).unwrap_or(path)
    }
}
