//! Numbered checkpoints: `checkpoint_12`.

use std::fs;
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use crate::error::Error;

/// Returns the path of the checkpoint with a number: `checkpoint_N` in `folder`.
#[must_use]
pub fn numbered_path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number}"))
}

/// Returns the numbers of the checkpoints in a folder, ascending. Empty if the folder does not exist.
///
/// # Errors
/// Fails with [`Error::Io`] if the folder cannot be read.
pub fn numbered(folder: &Path) -> Result<Vec<u64>, Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("read", folder)(error)),
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io("read", folder))?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        // `checkpoint_007` was not written by this library.
        let number = number.and_then(|n| n.parse().ok().filter(|m: &u64| m.to_string() == n));
        if let Some(number) = number
            && entry.path().is_dir()
        {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns the path of the newest checkpoint in a folder: the one with the greatest number that has a manifest.
///
/// # Errors
/// Fails with [`Error::NotACheckpoint`] if there is none, or with [`Error::Io`].
pub fn latest(folder: &Path) -> Result<PathBuf, Error> {
    for number in numbered(folder)?.into_iter().rev() {
        let path = numbered_path(folder, number);
        match Manifest::read(&path) {
            // A folder of that name without a manifest must not hide the checkpoint before it.
            Err(Error::NotACheckpoint { .. }) => {}
            _ => return Ok(path),
        }
    }
    Err(Error::NotACheckpoint {
        path: folder.to_owned(),
        fact: format!("it holds no folder {PREFIX}N with a checkpoint"),
    })
}

const PREFIX: &str = "checkpoint_";
