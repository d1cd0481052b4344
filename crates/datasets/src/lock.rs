//! Locks on files that processes of one host share.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens the file at `path`, or makes it, and has it locked until it is closed; waits while another process has
/// it. The process that has the lock may rename or remove the file.
pub(crate) fn open_locked(path: &Path) -> io::Result<File> {
    loop {
        let mut options = File::options();
        // As any other file: a data folder is often shared. The process's mask still applies.
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

/// Where the file system has no locks, work goes on without: what two processes then write into each other is
/// found by the checksums.
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
