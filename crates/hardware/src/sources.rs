//! Source of the facts: the running system, or a folder of files that a test has made.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Source of the facts about a host: a root folder with `/proc`, `/sys`, `/dev` and `/etc`, and environment variables.
#[derive(Clone, Debug)]
pub struct Sources {
    root: PathBuf,
    variables: BTreeMap<String, String>,
}

impl Sources {
    /// Returns the running system: root `/` and the environment of this process.
    #[must_use]
    pub fn system() -> Self {
        let variables = std::env::vars_os()
            .map(|(name, value)| {
                (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
            })
            .collect();
        Self { root: PathBuf::from("/"), variables }
    }

    /// Returns a host that consists of the files under `root`, without environment variables.
    #[must_use]
    pub fn under(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), variables: BTreeMap::new() }
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Returns the root of the host's file system.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns all environment variables.
    #[must_use]
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    /// Returns an environment variable. `None` if it is not set or empty.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns the path in this process of a file on the host: `path` below the root.
    #[must_use]
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the path on the host of a file in this process, the inverse of [`path`](Self::path). A path outside of
    /// the root is returned as is.
    #[must_use]
    pub fn on_host(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.root) {
            Ok(rest) => Path::new("/").join(rest),
            Err(_) => path.to_owned(),
        }
    }

    /// Returns the text of a file, at most the first 4 MiB. `None` if it cannot be read.
    #[must_use]
    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut bytes = Vec::new();
        let file = File::open(self.path(path)).ok()?;
        file.take(MAX_TEXT_LEN).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the value in a small file, without surrounding white space and null characters. `None` if the file is
    /// empty or cannot be read.
    #[must_use]
    pub fn value(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = self.read(path)?;
        let value = text.trim_matches(|it: char| it.is_whitespace() || it == '\0');
        (!value.is_empty()).then(|| value.to_owned())
    }

    /// Runs a program of the host and returns its standard output. `None` if the program is missing, fails, or takes
    /// longer than 10 seconds.
    #[must_use]
    pub fn output(&self, program: &str, arguments: &[&str]) -> Option<String> {
        let program = self.path(program);
        if !program.exists() {
            return None;
        }
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let mut out = child.stdout.take()?;
        let read = within(PROGRAM_LIMIT, move || {
            let mut text = Vec::new();
            out.read_to_end(&mut text).map(|_| text)
        });
        let Some(text) = read else {
            // A process that hangs in the driver can neither be killed nor waited for.
            let _ = child.kill();
            return None;
        };
        let status = within(PROGRAM_LIMIT, move || child.wait())?.ok()?;
        status.success().then(|| String::from_utf8_lossy(&text.unwrap_or_default()).into_owned())
    }

    /// Returns the names in a folder, sorted. Empty if the folder does not exist.
    #[must_use]
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
            .collect();
        names.sort();
        names
    }
}

/// Runs `work` on a thread of its own and returns its result, or `None` after the limit. Use it for calls to a file
/// server or name server, which may block for minutes. After the limit the thread is left running, since it cannot be
/// stopped.
pub fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new()
        .spawn(move || {
            let _ = sender.send(work());
        })
        .ok()?;
    receiver.recv_timeout(limit).ok()
}

/// Loading a driver takes seconds; a program whose device hangs never answers.
const PROGRAM_LIMIT: Duration = Duration::from_secs(10);

/// A limit is needed because files in `/proc` have no length.
const MAX_TEXT_LEN: u64 = 4 << 20;
