//! Source of Brigade's crates for what this program creates or builds with cargo.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use toml_edit::{DocumentMut, InlineTable, Value};

use crate::config::Usage;

/// Source of Brigade's crates.
#[derive(Debug, PartialEq)]
pub(crate) enum Source {
    /// A checkout, by its path.
    Checkout(PathBuf),
    /// A repository at a commit.
    Git { url: String, commit: String },
    /// The registry, in this version.
    Registry,
}

impl Source {
    /// Returns the checkout that the user names, or else the source that this program belongs to.
    pub(crate) fn new(checkout: Option<&Path>) -> anyhow::Result<Self> {
        match checkout {
            Some(folder) => Self::checkout(folder),
            None => Ok(Program::running()?.source()),
        }
    }

    fn checkout(folder: &Path) -> anyhow::Result<Self> {
        let folder = fs::canonicalize(folder)
            .with_context(|| format!("--brigade {}: there is no such folder", folder.display()))?;
        if !folder.join(FACADE).is_file() {
            bail!(Usage(format!("--brigade {}: not a checkout of Brigade", folder.display())));
        }
        Ok(Self::Checkout(folder))
    }

    /// Returns a line about the source and how to choose another one.
    pub(crate) fn description(&self) -> String {
        match self {
            Self::Checkout(root) => {
                format!("depends on Brigade in {}, a checkout on this machine", root.display())
            }
            Self::Git { url, commit } => format!("depends on Brigade from {url} at {commit:.12}"),
            Self::Registry => format!(
                "depends on Brigade {} from crates.io (--brigade CHECKOUT: on a checkout)",
                requirement(VERSION)
            ),
        }
    }

    /// Returns the dependency with a feature.
    pub(crate) fn of_with(&self, folder: &str, feature: &str) -> Value {
        let mut table = match self.of(folder) {
            Value::InlineTable(table) => table,
            version => {
                let mut table = InlineTable::new();
                table.insert("version", version);
                table
            }
        };
        table.insert("features", Value::Array([feature].into_iter().collect()));
        Value::InlineTable(table)
    }

    /// Returns the dependency on one of the crates, by the crate's folder.
    pub(crate) fn of(&self, folder: &str) -> Value {
        let mut table = InlineTable::new();
        match self {
            Self::Checkout(root) => {
                let path = root.join("crates").join(folder);
                table.insert("path", path.to_string_lossy().into_owned().into());
            }
            Self::Git { url, commit } => {
                table.insert("git", url.as_str().into());
                table.insert("rev", commit.as_str().into());
            }
            Self::Registry => return requirement(VERSION).into(),
        }
        Value::InlineTable(table)
    }

    /// Returns the arguments with which `cargo install` builds programs of the crate `brigade` from this source.
    pub(crate) fn install_arguments(&self) -> Vec<OsString> {
        match self {
            Self::Checkout(root) => vec!["--path".into(), root.join("crates/brigade").into()],
            Self::Git { url, commit } => {
                vec!["--git".into(), url.into(), "--rev".into(), commit.into(), "brigade".into()]
            }
            Self::Registry => {
                vec!["brigade".into(), "--version".into(), format!("={VERSION}").into()]
            }
        }
    }
}

/// Returns the version requirement of a project that was created by this version: releases with another patch number are
/// compatible, releases that follow a pre-release are not.
fn requirement(version: &str) -> &str {
    match version.rsplit_once('.') {
        Some((minor, _)) if !version.contains('-') => minor,
        _ => version,
    }
}

/// A `brigade` and what says where it comes from.
struct Program {
    file: PathBuf,
    /// Folder of the package when it was compiled, possibly on another machine.
    built_in: PathBuf,
    /// Output of `cargo install --list` if cargo has installed the program.
    listed: Option<String>,
}

impl Program {
    fn running() -> anyhow::Result<Self> {
        let file = env::current_exe().context("cannot find this program's file")?;
        Ok(Self {
            listed: listed(&file),
            file,
            built_in: PathBuf::from(env!("CARGO_MANIFEST_DIR")),
        })
    }

    /// Chooses by what is on this machine: the folder in which the program was compiled may be gone, may have been on
    /// another machine, or may be another version by now.
    fn source(&self) -> Source {
        if let Some(list) = &self.listed {
            return installed(list);
        }
        if !self.file.ancestors().any(is_cargos_output) {
            return Source::Registry;
        }
        let of_build = self.built_in.ancestors().nth(2);
        // A checkout that was moved together with its target folder.
        let around = self.file.ancestors();
        let found = of_build.into_iter().chain(around).find(|folder| is_this_version(folder));
        found.map_or(Source::Registry, |folder| Source::Checkout(folder.to_owned()))
    }
}

/// Returns `true` for the folder into which cargo builds a workspace.
fn is_cargos_output(folder: &Path) -> bool {
    fs::read_to_string(folder.join("CACHEDIR.TAG")).is_ok_and(|it| it.contains("created by cargo"))
}

/// Returns `true` for a checkout of Brigade in the version of this program.
fn is_this_version(folder: &Path) -> bool {
    let version = |text: String| -> Option<String> {
        let manifest: DocumentMut = text.parse().ok()?;
        let package = manifest.get("workspace")?.get("package")?;
        package.get("version")?.as_str().map(str::to_owned)
    };
    let found = fs::read_to_string(folder.join("Cargo.toml")).ok().and_then(version);
    folder.join(FACADE).is_file() && found.as_deref() == Some(VERSION)
}

/// Returns what cargo has installed into the folder of the program; `None` if cargo keeps no list there. The list has
/// the repository's URL, which no variable of the build contains.
fn listed(program: &Path) -> Option<String> {
    let root = program.parent()?.parent()?;
    if !root.join(".crates.toml").is_file() {
        return None;
    }
    let mut cargo = Command::new("cargo");
    cargo.args(["install", "--list", "--root"]).arg(root).stdin(Stdio::null());
    let list = cargo.output().ok().filter(|it| it.status.success())?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    list.lines().any(|line| line.starts_with(LISTED)).then_some(list)
}

/// Finds the source in the list of installed programs: `brigade-cli v0.1.0:` is from the registry, others have a path
/// or a URL with a commit in parentheses.
fn installed(list: &str) -> Source {
    let line = list.lines().find(|line| line.starts_with(LISTED)).unwrap_or_default();
    let source = line.split_once('(').and_then(|(_, rest)| rest.split_once(')'));
    let Some((source, _)) = source else { return Source::Registry };
    if let Some((url, commit)) = source.rsplit_once('#') {
        // `?branch=main` only names the branch of the commit.
        let url = url.split('?').next().unwrap_or(url).to_owned();
        return Source::Git { url, commit: commit.to_owned() };
    }
    let checkout = Path::new(source).ancestors().nth(2).filter(|folder| is_this_version(folder));
    checkout.map_or(Source::Registry, |folder| Source::Checkout(folder.to_owned()))
}

/// File that every checkout of Brigade has.
const FACADE: &str = "crates/brigade/Cargo.toml";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Beginning of this package's line in the list of installed programs.
const LISTED: &str = concat!(env!("CARGO_PKG_NAME"), " v");

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// Folder with a checkout of a version, and an output folder of cargo's outside of it.
    fn checkout(version: &str) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("checkout");
        fs::create_dir_all(root.join("crates/brigade")).unwrap();
        fs::write(root.join(FACADE), "").unwrap();
        let text = format!("[workspace.package]\nversion = {version:?}\n");
        fs::write(root.join("Cargo.toml"), text).unwrap();
        for target in [root.join("target"), folder.path().join("target")] {
            fs::create_dir(&target).unwrap();
            fs::write(target.join("CACHEDIR.TAG"), "# a tag created by cargo.\n").unwrap();
        }
        folder
    }

    fn source(file: PathBuf, built_in: &str, listed: Option<String>) -> Source {
        Program { file, built_in: PathBuf::from(built_in), listed }.source()
    }

    #[test]
    fn a_program_in_cargos_output_belongs_to_its_checkout() {
        let folder = checkout(VERSION);
        let root = folder.path().join("checkout");
        let package = root.join("crates/cli");
        let expected = Source::Checkout(root.clone());
        let package = package.to_str().unwrap();
        for target in [root.join("target"), folder.path().join("target")] {
            assert_eq!(source(target.join("debug/brigade"), package, None), expected);
        }
        // The checkout was moved.
        assert_eq!(
            source(root.join("target/x/shipped/brigade"), "/gone/crates/cli", None),
            expected
        );
    }

    #[test]
    fn a_program_elsewhere_takes_the_release_although_its_checkout_exists() {
        let folder = checkout(VERSION);
        let package = folder.path().join("checkout/crates/cli");
        for file in ["venv/bin/brigade", "checkout/venv/bin/brigade"] {
            let file = folder.path().join(file);
            assert_eq!(source(file, package.to_str().unwrap(), None), Source::Registry);
        }
    }

    #[test]
    fn a_checkout_of_another_version_is_not_used() {
        let folder = checkout("9.8.7");
        let root = folder.path().join("checkout");
        let package = root.join("crates/cli");
        let built = source(root.join("target/debug/brigade"), package.to_str().unwrap(), None);
        assert_eq!(built, Source::Registry);
        let list = format!("brigade-cli v{VERSION} ({}):\n    brigade\n", package.display());
        assert_eq!(installed(&list), Source::Registry);
    }

    #[test]
    fn the_list_of_installed_programs_names_the_source() {
        let folder = checkout(VERSION);
        let root = folder.path().join("checkout");
        let entry = |place: &str| {
            let list = format!("a v1.0.0:\n    a\nbrigade-cli v0.1.0{place}:\n    brigade\n");
            source(PathBuf::from("/usr/local/bin/brigade"), "/gone/crates/cli", Some(list))
        };
        assert_eq!(entry(""), Source::Registry);
        let path = format!(" ({}/crates/cli)", root.display());
        assert_eq!(entry(&path), Source::Checkout(root));
        let git = entry(" (https://example.com/b/brigade?branch=main#89abcdef)");
        assert_eq!(
            git.of("brigade").to_string().trim(),
            r#"{ git = "https://example.com/b/brigade", rev = "89abcdef" }"#
        );
    }

    #[test]
    fn a_release_is_required_without_its_patch_number() {
        for (version, expected) in
            [("0.1.0", "0.1"), ("1.12.3", "1.12"), ("0.2.0-rc.1", "0.2.0-rc.1")]
        {
            assert_eq!(requirement(version), expected);
        }
        let dependency = Source::Registry.of_with("testkit", "photos").to_string();
        let expected =
            format!("{{ version = {:?}, features = [\"photos\"] }}", requirement(VERSION));
        assert_eq!(dependency.trim(), expected);
    }
}
