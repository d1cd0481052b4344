//! Locks on files and folders that processes of one host share.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;

/// Waits until no other process holds the lock of the open `file`, and takes it until the file is closed.
///
/// Where the file system has no locks, work goes on without: what two processes then write into each other is
/// found by the checksums.
pub(crate) fn lock(file: &File, path: &Path) {
    let error = match file.try_lock() {
        Ok(()) => return,
        Err(TryLockError::Error(error)) => error,
        Err(TryLockError::WouldBlock) => {
            tracing::info!(path = %path.display(), "another process is at work on it; waiting for it");
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
        "it cannot be locked; let one process of each host go first, as `main_process_first` does"
    );
}
