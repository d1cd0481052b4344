//! Home folder of a user, with the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// Home folder of its own.
pub(crate) struct Home(TempDir);

impl Home {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn own(&self) -> PathBuf {
        self.0.path().join(".config/brigade/config.toml")
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Returns the program with this home and no other variable that could be a setting.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
        command.env_clear().env("HOME", self.0.path()).env("PATH", "/usr/bin:/bin");
        command.env("TERM", "xterm").current_dir(self.0.path()).args(args);
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).stdin(Stdio::null()).output().unwrap()
    }

    /// Returns its stdout. It must succeed.
    pub(crate) fn answer(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*stderr), (Some(0), ""), "{args:?}");
        self.without_home(&output.stdout)
    }

    /// Returns its only line on stderr. It must fail with this code.
    pub(crate) fn refusal(&self, args: &[&str], code: i32) -> String {
        let output = self.run(args);
        let stderr = self.without_home(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
        stderr.trim_end().to_owned()
    }

    pub(crate) fn without_home(&self, bytes: &[u8]) -> String {
        String::from_utf8_lossy(bytes).replace(self.0.path().to_str().unwrap(), "~")
    }

    pub(crate) fn answer_of_ranks(&self, args: &[&str]) -> Vec<String> {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        let mut lines: Vec<String> =
            self.without_home(&output.stdout).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}
