//! Where facts are read from: the running system, or a tree of files that a test has made.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// A root folder for `/proc`, `/sys`, `/dev` and `/etc`, and the variables of the environment.
#[derive(Clone, Debug)]
pub struct Sources {
    root: PathBuf,
    variables: BTreeMap<String, String>,
}

impl Sources {
    /// The host as it is.
    #[must_use]
    pub fn system() -> Self {
        let variables = std::env::vars_os()
            .map(|(name, value)| {
                (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
            })
            .collect();
        Self { root: PathBuf::from("/"), variables }
    }

    /// A host that consists of the files under `root` and has no variables.
    #[must_use]
    pub fn under(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), variables: BTreeMap::new() }
    }

    /// The same with a variable.
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

    /// All variables of the environment.
    #[must_use]
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    /// A variable that is set and not empty.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Where a file of the host lies for us.
    #[must_use]
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// What a path of ours is called on the host.
    #[must_use]
    pub fn on_host(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.root) {
            Ok(rest) => Path::new("/").join(rest),
            Err(_) => path.to_owned(),
        }
    }

    /// The text of a small file, if it can be read.
    #[must_use]
    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut bytes = Vec::new();
        let file = File::open(self.path(path)).ok()?;
        file.take(MAX_TEXT_LEN).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The one value in a small file, without the end of its line.
    #[must_use]
    pub fn value(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = self.read(path)?;
        let value = text.trim_matches(|it: char| it.is_whitespace() || it == '\0');
        (!value.is_empty()).then(|| value.to_owned())
    }

    /// What a program of the host prints, where it is there and ends well, and soon.
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
            // One that hangs in the driver cannot be ended, nor waited for.
            let _ = child.kill();
            return None;
        };
        let status = within(PROGRAM_LIMIT, move || child.wait())?.ok()?;
        status.success().then(|| String::from_utf8_lossy(&text.unwrap_or_default()).into_owned())
    }

    /// Names in a folder, sorted; none where there is no such folder.
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

/// What `work` gives, or `None` when it takes longer than that: a dead file server or name server
/// blocks its callers for minutes. The thread is then left behind, the only way out.
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

/// A driver that was not loaded needs seconds; one whose device hangs does not answer.
const PROGRAM_LIMIT: Duration = Duration::from_secs(10);

/// Files in `/proc` have no length to look at first.
const MAX_TEXT_LEN: u64 = 4 << 20;
