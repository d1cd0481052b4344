//! The folders a job writes to: room, permission, and whether they answer at all.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

use brigade_hardware::mounts;
use brigade_hardware::{Sources, within};

/// A folder and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Folder {
    /// What the job does there.
    pub used_for: FolderUse,
    /// Where it is.
    pub path: PathBuf,
    /// How it is.
    pub state: FolderState,
}

/// What a job does in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderUse {
    /// It starts there, and mostly writes its checkpoints below it.
    Working,
    /// Temporary files.
    Temporary,
    /// The output of its ranks.
    Logs,
    /// `/dev/shm`: memory that processes share.
    SharedMemory,
}

/// How a folder is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderState {
    /// There is nothing of that name.
    Missing,
    /// It is a file.
    NotAFolder,
    /// The file system did not answer in time.
    Silent,
    /// The system refuses to say.
    Refused(String),
    /// It is there.
    There(Space),
}

/// Room in a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Space {
    /// The folder that was looked at: the path, or the nearest folder above it that is there.
    pub looked_at: PathBuf,
    /// Kind of the file system, such as `ext4` or `nfs4`.
    pub kind: String,
    /// Where the file system is: a device, or a server and its folder.
    pub source: String,
    /// Its size.
    pub total_bytes: u64,
    /// What this user may still fill.
    pub free_bytes: u64,
    /// How many files it can hold; 0 where it does not count them.
    pub inodes: u64,
    /// How many more files this user may make.
    pub free_inodes: u64,
    /// The file system is mounted for reading only.
    pub read_only: bool,
    /// This user may make files there.
    pub writable: bool,
}

/// Folders that are being looked at.
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
            // The launcher makes the folder for logs; what matters is where it will lie.
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
    FolderState::There(Space {
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

/// A file server that does not answer by then is a fault of its own.
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
        assert!(matches!(state(FolderUse::Working), FolderState::There(space)
            if space.writable && space.looked_at == Path::new("/srv")));
        assert_eq!(state(FolderUse::Temporary), FolderState::NotAFolder);
        assert_eq!(state(FolderUse::SharedMemory), FolderState::Missing);
        // The folder for logs will be made: its place is what counts.
        assert!(matches!(state(FolderUse::Logs), FolderState::There(space)
            if space.looked_at == Path::new("/srv")));
    }
}
