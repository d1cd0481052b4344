//! Locks on files that processes of one host share.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens or creates the file at `path`, and locks it until it is closed. Waits while another process holds the lock.
/// The process that holds the lock may rename or remove the file.
pub(crate) fn open_locked(path: &Path) -> io::Result<File> {
    loop {
        let mut options = File::options();
        // The usual mode of a file, because a data folder is often shared. The process's umask still applies.
        options.read(true).write(true).create(true).truncate(false).mode(0o666);
        let file = options.open(path)?;
        lock(&file, path);
        let opened = file.metadata()?;
        let is_same = |found: Metadata| (found.dev(), found.ino()) == (opened.dev(), opened.ino());
        if fs::symlink_metadata(path).is_ok_and(is_same) {
            return Ok(file);
        }
    }
}

/// Locks the file. On a file system without locks, work continues without one: if two processes then write to the same
/// file, the checksums detect it.
fn lock(file: &File, path: &Path) {
    let error = match file.try_lock() {
        Ok(()) => return,
        Err(TryLockError::Error(error)) => error,
        Err(TryLockError::WouldBlock) => {
            tracing::info!(path = %path.display(), "another process is using the file; waiting for it");
            loop {
                match file.lock() {
                    Ok(()) => return,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => break error,
                }
            }
        }
    };
    tracing::warn!(
        path = %path.display(),
        %error,
        "the file cannot be locked; run this in one process of each host first, as `main_process_first` does"
    );
}
