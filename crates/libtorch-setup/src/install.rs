//! Installation in the cache: its stamp `VERSION`, and its comparison with the pins.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::pins::Contents;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    Absent,
    Ready,
    /// An installation exists but must be fetched again, for this reason.
    Stale(String),
}

/// Reads the stamp and checks that the libraries in it exist, without checksums: takes microseconds.
pub(crate) fn state(folder: &Path, contents: &Contents<'_>) -> Result<State> {
    if fs::symlink_metadata(folder).is_err() {
        return Ok(State::Absent);
    }
    let Ok(text) = fs::read_to_string(folder.join(STAMP)) else {
        bail!(
            "{} was not fetched by Brigade (it has no file {STAMP}): remove it{}",
            folder.display(),
            contents.instead
        );
    };
    let stamp = Stamp::parse(&text);
    let stale = |reason| Ok(State::Stale(reason));
    for pin in &contents.wheels {
        if stamp.packages.contains(&pin.requirement().as_str()) {
            continue;
        }
        let same_package = format!("{}==", pin.package);
        let found = stamp.packages.iter().find(|it| it.starts_with(&same_package));
        let found = found.copied().unwrap_or("none of it");
        return stale(format!("it has {found} instead of {}", pin.requirement()));
    }
    for (path, bytes) in &stamp.files {
        let found = fs::metadata(folder.join(path)).map(|it| it.len()).ok();
        match found {
            None => return stale(format!("{path} is missing from it")),
            Some(found) if found != *bytes => {
                return stale(format!("{path} in it has {found} bytes instead of {bytes}"));
            }
            Some(_) => {}
        }
    }
    Ok(State::Ready)
}

/// Writes the stamp of a complete tree, just before the tree is moved into place.
pub(crate) fn write_stamp(tree: &Path, contents: &Contents<'_>) -> Result<()> {
    let mut text = format!("{}\n", contents.name);
    for pin in &contents.wheels {
        text.push_str(&pin.requirement());
        text.push('\n');
    }
    let mut libraries = Vec::new();
    libraries_under(tree, "", &mut libraries)?;
    libraries.sort();
    for (path, bytes) in libraries {
        text.push_str(&format!("{bytes} {path}\n"));
    }
    let path = tree.join(STAMP);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

struct Stamp<'a> {
    packages: Vec<&'a str>,
    files: Vec<(&'a str, u64)>,
}

impl<'a> Stamp<'a> {
    /// Unknown lines are ignored. If they were essential, the installation counts as stale.
    fn parse(text: &'a str) -> Self {
        let mut stamp = Self { packages: Vec::new(), files: Vec::new() };
        for line in text.lines().skip(1) {
            if line.contains("==") {
                stamp.packages.push(line);
            } else if let Some((bytes, path)) = line.split_once(' ')
                && let Ok(bytes) = bytes.parse()
            {
                stamp.files.push((path, bytes));
            }
        }
        stamp
    }
}

/// Collects the shared libraries below `folder`, relative to the tree, and the file with PyTorch's version, each with
/// its size.
fn libraries_under(tree: &Path, folder: &str, found: &mut Vec<(String, u64)>) -> Result<()> {
    let cannot_read = || format!("cannot read {}", tree.join(folder).display());
    for entry in fs::read_dir(tree.join(folder)).with_context(cannot_read)? {
        let entry = entry.with_context(cannot_read)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
        let about = entry.metadata().with_context(cannot_read)?;
        if about.is_dir() {
            libraries_under(tree, &path, found)?;
        } else if path.ends_with(".so") || path.contains(".so.") || path == "torch/version.py" {
            found.push((path, about.len()));
        }
    }
    Ok(())
}

const STAMP: &str = "VERSION";
