//! A private folder for the ranks' error files, gone with its owner.

use std::fs;
use std::path::{Path, PathBuf};

use nix::unistd::mkdtemp;

#[derive(Debug)]
pub(crate) struct RunFolder {
    path: Option<PathBuf>,
}

#[derive(Debug)]
pub(crate) struct AttemptFolder {
    path: Option<PathBuf>,
}

impl RunFolder {
    /// Makes it where that is possible: a job can do without.
    pub(crate) fn create() -> Self {
        Self { path: mkdtemp(&std::env::temp_dir().join("brigade-XXXXXX")).ok() }
    }

    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    pub(crate) fn attempt(&self, number: u32, nproc: usize) -> AttemptFolder {
        let path = self.path.as_ref().map(|run| run.join(format!("attempt_{number}")));
        let made = path.filter(|path| {
            (0..nproc).all(|rank| fs::create_dir_all(path.join(rank.to_string())).is_ok())
        });
        AttemptFolder { path: made }
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = fs::remove_dir_all(path);
        }
    }
}

impl AttemptFolder {
    pub(crate) fn error_file(&self, local_rank: usize) -> Option<PathBuf> {
        Some(self.path.as_ref()?.join(local_rank.to_string()).join("error.json"))
    }
}
