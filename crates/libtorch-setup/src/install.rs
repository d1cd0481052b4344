//! Installation in the cache: its stamp `VERSION`, and its comparison with the pins.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::pins::{Kind, Pins};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    Absent,
    Ready,
    /// An installation exists but must be fetched again, for this reason.
    Stale(String),
}

/// Reads the stamp and checks that the libraries in it exist, without checksums: takes microseconds.
pub(crate) fn state(folder: &Path, pins: &Pins, kind: Kind) -> Result<State> {
    if fs::symlink_metadata(folder).is_err() {
        return Ok(State::Absent);
    }
    let Ok(text) = fs::read_to_string(folder.join(STAMP)) else {
        bail!(
            "{} was not fetched by Brigade (it has no file {STAMP}): remove it, or set LIBTORCH to \
             the folder in it that has lib/ and include/",
            folder.display()
        );
    };
    let stamp = Stamp::parse(&text);
    let stale = |reason| Ok(State::Stale(reason));
    for pin in pins.of(kind) {
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
pub(crate) fn write_stamp(tree: &Path, pins: &Pins, kind: Kind) -> Result<()> {
    let mut text = format!("libtorch {} {}\n", pins.libtorch_version(), kind.name());
    for pin in pins.of(kind) {
        text.push_str(&pin.requirement());
        text.push('\n');
    }
    let mut libraries = vec!["torch/version.py".to_owned()];
    libraries_under(tree, "torch/lib", &mut libraries)?;
    for package in folder_names(&tree.join("nvidia"))? {
        libraries_under(tree, &format!("nvidia/{package}/lib"), &mut libraries)?;
    }
    libraries.sort();
    for path in libraries {
        let bytes = fs::metadata(tree.join(&path))
            .with_context(|| format!("the wheels have no {path}"))?
            .len();
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

fn libraries_under(tree: &Path, folder: &str, found: &mut Vec<String>) -> Result<()> {
    found.extend(folder_names(&tree.join(folder))?.iter().map(|name| format!("{folder}/{name}")));
    Ok(())
}

fn folder_names(folder: &Path) -> Result<Vec<String>> {
    // Some packages contain no libraries.
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {}", folder.display()))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

const STAMP: &str = "VERSION";
