//! Folder of a network's files, with the removal of those of killed tests.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Folder that is removed with its contents when dropped.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Creates a folder, named after this process so that its owner can be determined.
    pub(crate) fn new() -> io::Result<Self> {
        // Several networks in one process.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let pid = std::process::id();
        let start = start_time(pid).unwrap_or_default();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{PREFIX}{pid}-{start}-{number}"));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next network.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders of tests that have ended.
pub(crate) fn sweep() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.filter_map(Result::ok) {
        if entry.file_name().to_str().is_some_and(|name| owner_is_gone(name) == Some(true)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns `true` if the owner has ended; `None` for a folder that no test created. A process ID may have been reused:
/// the start time distinguishes the processes.
fn owner_is_gone(name: &str) -> Option<bool> {
    let mut parts = name.strip_prefix(PREFIX)?.split('-');
    let pid = parts.next()?.parse().ok()?;
    let start: u64 = parts.next()?.parse().ok()?;
    Some(start_time(pid) != Some(start))
}

/// Returns the start time of a process, in ticks since boot.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may contain anything, parentheses and blanks included.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

const PREFIX: &str = "brigade-test-hosts-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dead_owners_lose_their_folders() {
        let folder = Folder::new().unwrap();
        let name = folder.path().file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(owner_is_gone(&name), Some(false));
        let pid = std::process::id();
        assert_eq!(owner_is_gone(&format!("{PREFIX}{pid}-1-0")), Some(true), "another start");
        assert_eq!(owner_is_gone(&format!("{PREFIX}4194305-1-0")), Some(true));
        assert_eq!(owner_is_gone("brigade-test-hosts-notes"), None);
        assert_eq!(owner_is_gone("something-1-2"), None);
    }

    #[test]
    fn a_dead_owners_folder_is_swept() {
        let dead = std::env::temp_dir().join(format!("{PREFIX}4194305-1-0"));
        fs::create_dir_all(dead.join("node1")).unwrap();
        let mine = Folder::new().unwrap();
        sweep();
        assert!(!dead.exists());
        assert!(mine.path().exists());
    }
}
