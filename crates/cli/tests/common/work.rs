//! Folder with a program, in which a job is started.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

use crate::job::{Job, Run};

/// Folder in which a job is started.
pub(crate) struct Work(TempDir);

impl Work {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let work = Self(tempfile::tempdir().unwrap());
        for (name, text) in files {
            let path = work.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        work
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn allow(&self, name: &str) {
        let path = self.path().join(name);
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn job(&self, nproc: usize) -> Job {
        let mut job = Job::new(nproc);
        job.command.current_dir(self.path()).env_remove("PYTHON_EXEC").env_remove("VIRTUAL_ENV");
        job
    }

    pub(crate) fn run(&self, nproc: usize, words: &[&str]) -> Run {
        self.job(nproc).words(words.iter().copied()).run()
    }
}
