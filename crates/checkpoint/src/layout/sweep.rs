//! Removal of folders left by killed runs, and of checkpoints beyond a limit.

use std::fs::{self, File};
use std::path::Path;

use super::names::{numbered, numbered_path};
use super::staging::{STAGING, flush_folder, staging_path};
use crate::error::Error;

/// Removes folders that were being written or removed when their run was killed, and returns their number. Folders of
/// live runs are locked and stay.
///
/// # Errors
/// Fails with [`Error::Io`] if the folder cannot be listed. Folders that cannot be removed are skipped.
pub fn sweep(folder: &Path) -> Result<usize, Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(Error::io("read", folder)(error)),
    };
    let mut removed = 0;
    for entry in entries {
        let entry = entry.map_err(Error::io("read", folder))?;
        let name = entry.file_name();
        let ours =
            name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(STAGING));
        if !ours || !entry.path().is_dir() {
            continue;
        }
        let path = entry.path();
        // Held until the folder is gone, so that two sweeps do not remove the same folder.
        let Ok(lock) = File::open(&path) else { continue };
        if lock.try_lock().is_ok() && fs::remove_dir_all(&path).is_ok() {
            removed += 1;
        }
    }
    Ok(removed)
}

/// Removes the checkpoints with the smallest numbers until `limit` are left. Each is renamed first, so that no partial
/// checkpoint is ever visible.
///
/// # Errors
/// Fails with [`Error::Io`] if a checkpoint cannot be renamed or removed.
pub fn keep_newest(folder: &Path, limit: usize) -> Result<(), Error> {
    let numbers = numbered(folder)?;
    let too_many = numbers.len().saturating_sub(limit);
    for &number in &numbers[..too_many] {
        let path = numbered_path(folder, number);
        let hidden = staging_path(&path, "old")?;
        let _ = fs::remove_dir_all(&hidden);
        fs::rename(&path, &hidden).map_err(Error::io("remove", &path))?;
        fs::remove_dir_all(&hidden).map_err(Error::io("remove", &path))?;
    }
    if too_many > 0 {
        flush_folder(folder)?;
    }
    Ok(())
}
