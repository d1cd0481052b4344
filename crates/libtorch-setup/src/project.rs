//! Cargo project with its configuration of libtorch's location.
//!
//! `.cargo/libtorch.toml` contains what belongs to this machine, and is not for git; the project's own
//! `.cargo/config.toml` includes it if it exists.

use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};

use anyhow::{Context, Result, bail};
use toml_edit::{Array, DocumentMut, InlineTable, Item, Value};

use crate::libtorch::Libtorch;

/// Cargo package or workspace.
#[derive(Clone, Debug)]
pub struct Project {
    root: PathBuf,
}

/// Selection of the programs that are linked with a run path, the folder in which the loader looks for libtorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPath {
    /// Everything that cargo links in the project.
    All,
    /// Only doc tests. The packages' own build scripts set the run path of all other programs.
    DocTests,
}

/// Change of a file in the project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The file was written or replaced.
    Wrote(PathBuf),
    /// A line or a key was added to the file.
    LineAdded(PathBuf),
    /// A line or a key that had been added was removed from the file.
    LineRemoved(PathBuf),
    /// The file was removed.
    Removed(PathBuf),
}

impl fmt::Display for Change {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrote(path) => write!(out, "wrote {}", path.display()),
            Self::LineAdded(path) => write!(out, "added a line to {}", path.display()),
            Self::LineRemoved(path) => write!(out, "removed a line from {}", path.display()),
            Self::Removed(path) => write!(out, "removed {}", path.display()),
        }
    }
}

impl Project {
    /// Finds the project of a folder with cargo. In a workspace that is the workspace, since its configuration applies
    /// to all its packages.
    ///
    /// # Errors
    /// Fails if cargo is missing, if neither the folder nor its parents have a `Cargo.toml`, or if that is malformed.
    pub fn find(from: &Path) -> Result<Self> {
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["locate-project", "--workspace", "--message-format", "plain"]);
        let output = match command.current_dir(from).output() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                bail!("cannot find cargo, or the folder {}", from.display())
            }
            other => other.context("cannot start cargo")?,
        };
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let lines = text
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty() && *line != "Caused by:");
            let reason = lines.collect::<Vec<_>>().join(": ");
            let reason = reason.strip_prefix("error: ").unwrap_or(&reason);
            bail!("cargo finds no project in {}: {reason}", from.display());
        }
        let manifest =
            String::from_utf8(output.stdout).context("the project's path is not UTF-8")?;
        let root = Path::new(manifest.trim()).parent().context("Cargo.toml lies in no folder")?;
        Ok(Self::at(root))
    }

    /// Returns the project whose `Cargo.toml` is in this folder.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }

    /// Returns the folder with the project's `Cargo.toml`.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Configures cargo so that builds in the project find this libtorch, and the programs that they link load it.
    /// Returns the files that were changed; files that are up to date are left alone.
    ///
    /// `LIBTORCH` in the environment still takes precedence over the file.
    ///
    /// # Errors
    /// Fails if a file cannot be read or written, or `.cargo/config.toml` is malformed.
    pub fn configure(&self, libtorch: &Libtorch, run_path: RunPath) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        let text = text(libtorch, run_path)?;
        changes
            .extend(self.write(LIBTORCH_TOML, &text)?.then(|| Change::Wrote(LIBTORCH_TOML.into())));
        changes.extend(self.include()?);
        changes.extend(self.ignore()?);
        Ok(changes)
    }

    /// Writes only the run path of doc tests. This is for a libtorch that the environment names: cargo reads the
    /// variable itself, and no trace of it should stay in the project when the variable is removed.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn configure_doc_tests(&self, libtorch: &Libtorch) -> Result<()> {
        let mut text = HEADER.to_owned();
        if libtorch.bypasses_version_check() {
            text.push_str("[env]\nLIBTORCH_BYPASS_VERSION_CHECK = \"1\"\n\n");
        }
        let flags = run_path_flags(libtorch)?;
        text.push_str(&format!("[build]\nrustdocflags = {flags}\n"));
        self.write(LIBTORCH_TOML, &text)?;
        Ok(())
    }

    /// Reverts [`configure`](Self::configure). The cache is kept, as other projects may use it.
    ///
    /// # Errors
    /// Fails if a file cannot be read, written or removed, or `.cargo/config.toml` is malformed.
    pub fn remove(&self) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        changes.extend(self.exclude()?);
        match fs::remove_file(self.root.join(LIBTORCH_TOML)) {
            Ok(()) => changes.push(Change::Removed(LIBTORCH_TOML.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot remove {LIBTORCH_TOML}"));
            }
        }
        // Fails if the folder contains other files.
        let _ = fs::remove_dir(self.root.join(".cargo"));
        let path = self.root.join(GITIGNORE);
        if let Some(text) = read(&path)?
            && text.lines().any(|line| line == IGNORED)
        {
            let kept: String =
                text.split_inclusive('\n').filter(|line| line.trim_end() != IGNORED).collect();
            if kept.is_empty() {
                fs::remove_file(&path).with_context(|| format!("cannot remove {GITIGNORE}"))?;
                changes.push(Change::Removed(GITIGNORE.into()));
            } else {
                self.write(GITIGNORE, &kept)?;
                changes.push(Change::LineRemoved(GITIGNORE.into()));
            }
        }
        Ok(changes)
    }

    /// Returns the libtorch that `.cargo/libtorch.toml` names, if any.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is malformed.
    pub fn libtorch(&self) -> Result<Option<PathBuf>> {
        let Some(text) = read(&self.root.join(LIBTORCH_TOML))? else { return Ok(None) };
        configured(&text)
    }

    /// Returns flags that take precedence over the run path in the project's configuration, each with its source as a
    /// message for the user.
    ///
    /// # Errors
    /// Fails if a configuration file of cargo is malformed.
    pub fn overriding_flags(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
            if env::var_os(name).is_some_and(|value| !value.is_empty()) {
                found.push(format!("the variable {name}"));
            }
        }
        let home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(env::home_dir()?.join(".cargo")));
        let files = [Some(self.config()), home.map(|it| it.join("config.toml"))];
        for path in files.into_iter().flatten() {
            let Some(text) = read(&path)? else { continue };
            let document: DocumentMut =
                text.parse().with_context(|| format!("{} is malformed", path.display()))?;
            let targets = document.get("target").and_then(Item::as_table_like);
            for (name, table) in targets.into_iter().flat_map(|it| it.iter()) {
                if table.get("rustflags").is_some() {
                    found.push(format!("[target.{name}] in {}", path.display()));
                }
            }
        }
        Ok(found)
    }

    /// Returns the project's cargo configuration. One without `.toml` in its name takes precedence, as in cargo.
    fn config(&self) -> PathBuf {
        let old = self.root.join(".cargo/config");
        if old.is_file() { old } else { self.root.join(CONFIG) }
    }

    /// Adds the file to the includes of the project's configuration.
    fn include(&self) -> Result<Option<Change>> {
        let path = self.config();
        let before = read(&path)?;
        let mut document = parse(&path, before.as_deref().unwrap_or_default())?;
        let mut includes = match document.remove("include") {
            None => Array::new(),
            Some(Item::Value(Value::Array(list))) => list,
            Some(_) => bail!("{}: `include` is not a list, which cargo requires", path.display()),
        };
        if includes.iter().any(is_ours) {
            return Ok(None);
        }
        let mut entry = InlineTable::new();
        entry.insert("path", INCLUDED.into());
        entry.insert("optional", true.into());
        includes.push(entry);
        document.insert("include", Item::Value(Value::Array(includes)));
        let name = self.relative(&path);
        Ok(Some(if before.is_none() {
            self.write(&name, &format!("{CONFIG_HEADER}{document}"))?;
            Change::Wrote(name.into())
        } else {
            self.write(&name, &document.to_string())?;
            Change::LineAdded(name.into())
        }))
    }

    /// Removes the file from the project's configuration.
    fn exclude(&self) -> Result<Option<Change>> {
        let path = self.config();
        let Some(before) = read(&path)? else { return Ok(None) };
        let mut document = parse(&path, &before)?;
        let Some(Item::Value(Value::Array(includes))) = document.get_mut("include") else {
            return Ok(None);
        };
        let all = includes.len();
        includes.retain(|entry| !is_ours(entry));
        if includes.len() == all {
            return Ok(None);
        }
        if includes.is_empty() {
            document.remove("include");
        }
        let name = self.relative(&path);
        let rest = document.to_string();
        Ok(Some(if rest.trim().is_empty() || rest.trim() == CONFIG_HEADER.trim() {
            fs::remove_file(&path).with_context(|| format!("cannot remove {name}"))?;
            Change::Removed(name.into())
        } else {
            self.write(&name, &rest)?;
            Change::LineRemoved(name.into())
        }))
    }

    /// Adds the file to `.gitignore` if the project is in a git repository that does not ignore it yet.
    fn ignore(&self) -> Result<Option<Change>> {
        let mut git = Command::new("git");
        git.args(["check-ignore", "--quiet", LIBTORCH_TOML]).current_dir(&self.root);
        let status = git.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        // Exit code 0: it is ignored; 128: not a repository.
        if !status.is_ok_and(|status| status.code() == Some(1)) {
            return Ok(None);
        }
        let path = self.root.join(GITIGNORE);
        let before = read(&path)?;
        let mut text = before.clone().unwrap_or_default();
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(IGNORED);
        text.push('\n');
        self.write(GITIGNORE, &text)?;
        Ok(Some(match before {
            None => Change::Wrote(GITIGNORE.into()),
            Some(_) => Change::LineAdded(GITIGNORE.into()),
        }))
    }

    /// Writes a file of the project atomically. Returns `true` if its content changed.
    fn write(&self, name: &str, text: &str) -> Result<bool> {
        let path = self.root.join(name);
        if fs::read_to_string(&path).is_ok_and(|found| found == text) {
            return Ok(false);
        }
        let folder = path.parent().context("a file of the project lies in a folder")?;
        let unfinished = folder.join(format!(".brigade-setup.{}", process::id()));
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&unfinished, text))
            .and_then(|()| fs::rename(&unfinished, &path));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(true)
    }

    fn relative(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap_or(path).display().to_string()
    }
}

/// Returns the libtorch that the text of a `.cargo/libtorch.toml` names, if any.
///
/// # Errors
/// Fails if the text is not valid TOML.
pub fn configured(text: &str) -> Result<Option<PathBuf>> {
    let document: DocumentMut =
        text.parse().with_context(|| format!("{LIBTORCH_TOML} is malformed"))?;
    let value = document.get("env").and_then(|env| env.get("LIBTORCH"));
    Ok(value.and_then(Item::as_str).map(PathBuf::from))
}

/// Returns the text of `.cargo/libtorch.toml`.
fn text(libtorch: &Libtorch, run_path: RunPath) -> Result<String> {
    let folder = quoted(utf8(libtorch.folder())?)?;
    let flags = run_path_flags(libtorch)?;
    let mut text = format!("{HEADER}[env]\nLIBTORCH = {folder}\n");
    if libtorch.bypasses_version_check() {
        text.push_str("LIBTORCH_BYPASS_VERSION_CHECK = \"1\"\n");
    }
    text.push_str("\n[build]\n");
    if run_path == RunPath::All {
        text.push_str(&format!("rustflags = {flags}\n"));
    }
    text.push_str(&format!("rustdocflags = {flags}\n"));
    Ok(text)
}

/// Returns the run path as a list of flags in TOML. Without `-Wl,`, which splits at commas.
fn run_path_flags(libtorch: &Libtorch) -> Result<String> {
    let folder = libtorch.folder().join("lib");
    let mut flags = Vec::new();
    for word in ["-rpath", utf8(&folder)?] {
        for argument in ["-Xlinker", word] {
            flags.push(quoted("-C")?);
            flags.push(quoted(&format!("link-arg={argument}"))?);
        }
    }
    Ok(format!("[{}]", flags.join(", ")))
}

/// Quotes a string for TOML. JSON strings are also TOML strings.
fn quoted(text: &str) -> Result<String> {
    Ok(serde_json::to_string(text)?)
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| {
        format!("{} is not UTF-8, and cargo's configuration is: use another folder", path.display())
    })
}

/// Reads a file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn parse(path: &Path, text: &str) -> Result<DocumentMut> {
    text.parse().with_context(|| format!("{} is malformed", path.display()))
}

/// Returns `true` if an entry of `include` is the file: as a string, or as a table with its path.
fn is_ours(entry: &Value) -> bool {
    let path = entry.as_inline_table().and_then(|table| table.get("path")).unwrap_or(entry);
    path.as_str() == Some(INCLUDED)
}

const CONFIG: &str = ".cargo/config.toml";
const LIBTORCH_TOML: &str = ".cargo/libtorch.toml";
/// Name of the file as in `.cargo/config.toml`.
const INCLUDED: &str = "libtorch.toml";
const GITIGNORE: &str = ".gitignore";
const IGNORED: &str = "/.cargo/libtorch.toml";
const HEADER: &str = "# Written by `brigade setup`: where libtorch lies on this machine.\n";
const CONFIG_HEADER: &str =
    "# `brigade setup` writes libtorch.toml: where libtorch lies on this machine.\n";

#[cfg(test)]
mod tests;
