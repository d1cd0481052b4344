//! Facts about the folders that a job writes to: space, permissions, and whether the file system answers.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

use brigade_hardware::mounts;
use brigade_hardware::{Sources, within};

/// Folder with its purpose and state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Folder {
    /// Purpose of the folder in the job.
    pub used_for: FolderUse,
    /// Path of the folder.
    pub path: PathBuf,
    /// State of the folder, with its free space.
    pub state: FolderState,
}

/// Purpose of a folder in a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderUse {
    /// The working folder, which usually also contains the checkpoints.
    Working,
    /// The folder for temporary files.
    Temporary,
    /// The folder for the ranks' output.
    Logs,
    /// Shared memory of processes: `/dev/shm`.
    SharedMemory,
}

/// State of a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderState {
    /// The path does not exist.
    Missing,
    /// The path is not a folder.
    NotAFolder,
    /// The file system did not answer in time.
    Silent,
    /// The operating system returned another error. Contains its message.
    Refused(String),
    /// The folder exists.
    Present(Space),
}

/// Free space and properties of a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Space {
    /// Folder that was examined: the path, or its nearest existing parent.
    pub looked_at: PathBuf,
    /// Type of the file system, such as `ext4` or `nfs4`.
    pub kind: String,
    /// Source of the file system: a device, or a server with its folder.
    pub source: String,
    /// Size of the file system in bytes.
    pub total_bytes: u64,
    /// Free space for this user in bytes.
    pub free_bytes: u64,
    /// Number of inodes of the file system. 0 if it does not count them.
    pub inodes: u64,
    /// Number of free inodes.
    pub free_inodes: u64,
    /// `true` if the file system is mounted read-only.
    pub read_only: bool,
    /// `true` if this user may create files in the folder.
    pub writable: bool,
}

/// Folders that are being examined.
pub(super) struct Pending(Vec<std::thread::JoinHandle<Folder>>);

pub(super) fn start(sources: &Arc<Sources>, working: &Path, logs: Option<&Path>) -> Pending {
    let temporary = sources.variable("TMPDIR").unwrap_or("/tmp").into();
    let mut wanted = vec![
        (FolderUse::Working, working.to_owned()),
        (FolderUse::Temporary, temporary),
        (FolderUse::SharedMemory, PathBuf::from("/dev/shm")),
    ];
    if let Some(logs) = logs {
        wanted.push((FolderUse::Logs, working.join(logs)));
    }
    let look = |(used_for, path): (FolderUse, PathBuf)| {
        let sources = Arc::clone(sources);
        std::thread::spawn(move || {
            let asked = path.clone();
            let state = within(TIMEOUT, move || state(&sources, used_for, &asked));
            Folder { used_for, path, state: state.unwrap_or(FolderState::Silent) }
        })
    };
    Pending(wanted.into_iter().map(look).collect())
}

impl Pending {
    pub(super) fn wait(self) -> Vec<Folder> {
        self.0.into_iter().filter_map(|thread| thread.join().ok()).collect()
    }
}

fn state(sources: &Sources, used_for: FolderUse, path: &Path) -> FolderState {
    let mut looked_at = path.to_owned();
    loop {
        match std::fs::metadata(sources.path(&looked_at)) {
            Ok(found) if found.is_dir() => break,
            Ok(_) => return FolderState::NotAFolder,
            // The launcher creates the folder for logs; what matters is its file system.
            Err(error) if error.kind() == ErrorKind::NotFound && used_for == FolderUse::Logs => {
                if !looked_at.pop() {
                    return FolderState::Missing;
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => return FolderState::Missing,
            Err(error) => return FolderState::Refused(error.to_string()),
        }
    }
    let place = sources.path(&looked_at);
    let room = match statvfs(&place) {
        Ok(room) => room,
        Err(error) => return FolderState::Refused(error.desc().to_owned()),
    };
    let mounts = mounts::all(sources);
    let real = std::fs::canonicalize(&place).unwrap_or_else(|_| place.clone());
    let mount = mounts::of(&mounts, &sources.on_host(&real));
    let block = room.fragment_size();
    FolderState::Present(Space {
        kind: mount.map(|it| it.kind.clone()).unwrap_or_default(),
        source: mount.map(|it| it.source.clone()).unwrap_or_default(),
        total_bytes: room.blocks() * block,
        free_bytes: room.blocks_available() * block,
        inodes: room.files(),
        free_inodes: room.files_available(),
        read_only: room.flags().contains(FsFlags::ST_RDONLY),
        writable: access(&place, AccessFlags::W_OK | AccessFlags::X_OK).is_ok(),
        looked_at,
    })
}

/// Time limit of a file server. A server that has not answered by then is reported as a fault.
const TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_found_missing_or_no_folders() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("srv")).unwrap();
        std::fs::write(root.path().join("tmp"), "").unwrap();
        let sources = Arc::new(Sources::under(root.path()));
        let logs = Path::new("runs/7");
        let folders = start(&sources, Path::new("/srv"), Some(logs)).wait();
        let state = |wanted| {
            folders.iter().find(|it| it.used_for == wanted).map(|it| it.state.clone()).unwrap()
        };
        assert!(matches!(state(FolderUse::Working), FolderState::Present(space)
            if space.writable && space.looked_at == Path::new("/srv")));
        assert_eq!(state(FolderUse::Temporary), FolderState::NotAFolder);
        assert_eq!(state(FolderUse::SharedMemory), FolderState::Missing);
        // The folder for logs will be created: its file system is what counts.
        assert!(matches!(state(FolderUse::Logs), FolderState::Present(space)
            if space.looked_at == Path::new("/srv")));
    }
}
