//! Writing of a checkpoint's folder under a temporary name that is not taken for a checkpoint.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::manifest::{MANIFEST, Manifest};
use crate::error::Error;
use crate::layout::file::write_file;

/// A checkpoint that is being written. Removed when it is dropped without [`Staging::commit`].
///
/// The folder is locked (`flock`) during the owner's lifetime, so that others can tell it from one left by a killed
/// run.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    target: PathBuf,
    lock: Option<File>,
    done: bool,
}

/// Returns the temporary path under which `target` is written: hidden, in the same folder, so that a rename completes
/// it.
///
/// # Errors
/// Fails with [`Error::Unsupported`] for a path without a last component, such as `/` or `..`.
pub fn staging_path(target: &Path, unique: &str) -> Result<PathBuf, Error> {
    let Some(name) = target.file_name() else {
        return Err(Error::Unsupported {
            path: target.to_owned(),
            fact: "a checkpoint needs a folder with a name: expected a path that does not end in `/` or `..`".into(),
        });
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{unique}{STAGING}"));
    Ok(target.with_file_name(hidden))
}

impl Staging {
    /// Creates the temporary folder, and its parents. `unique` distinguishes it from the folders of other runs with the
    /// same target.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], or with [`Error::Occupied`] if `target` is neither a checkpoint nor an empty folder.
    pub fn create(target: &Path, unique: &str) -> Result<Self, Error> {
        let path = staging_path(target, unique)?;
        check_target(target)?;
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(Error::io("make", parent))?;
        }
        fs::create_dir(&path).map_err(Error::io("make", &path))?;
        let mut staging = Self { path, target: target.to_owned(), lock: None, done: false };
        let lock = File::open(&staging.path).map_err(Error::io("open", &staging.path))?;
        // On a file system without locks, sweeping gets none either and removes nothing.
        let _ = lock.try_lock();
        staging.lock = Some(lock);
        Ok(staging)
    }

    /// Returns the path of the temporary folder, in which the files are written.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the manifest and renames the folder to the target. An old checkpoint of that name is removed afterwards.
    /// With `flush`, flushes manifest and folders to the disk.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], or with [`Error::Occupied`] or [`Error::Unsupported`] if the target cannot be
    /// replaced. The old checkpoint is removed only after the new one has the name.
    pub fn commit(self, manifest: &Manifest, flush: bool) -> Result<(), Error> {
        self.replace(manifest, flush)?.map_or(Ok(()), Replaced::remove)
    }

    /// Completes the checkpoint like [`Staging::commit`], but returns an old checkpoint of that name under its
    /// temporary name instead of removing it. On file systems that discard freed blocks at once, removing 1 GB takes a
    /// fifth of the time of writing it.
    ///
    /// # Errors
    /// Returns the same errors as [`Staging::commit`].
    pub fn replace(mut self, manifest: &Manifest, flush: bool) -> Result<Option<Replaced>, Error> {
        write_file(&self.path.join(MANIFEST), manifest.to_json().as_bytes(), flush)?;
        if flush {
            flush_folder(&self.path)?;
        }
        check_target(&self.target)?;
        let old = self.exchange()?;
        self.done = true;
        let parent = match self.target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if flush {
            flush_folder(parent)?;
        }
        Ok(old.then(|| Replaced::new(self.path.clone())))
    }

    /// Renames the folder to the target. Returns `true` if an old checkpoint is now under the temporary name.
    fn exchange(&self) -> Result<bool, Error> {
        let renamed = Error::io("rename", &self.path);
        let (new, target) = (&self.path, &self.target);
        match renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(true),
            // The name is free. An empty folder that appears meanwhile is replaced.
            Err(rustix::io::Errno::NOENT) => {
                fs::rename(new, target).map(|()| false).map_err(renamed)
            }
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if target.exists() => {
                Err(Error::Unsupported {
                    path: target.clone(),
                    fact: "this file system cannot exchange two folders, so a checkpoint cannot \
                           replace another without a moment in which there is none; save under a \
                           new name"
                        .into(),
                })
            }
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                fs::rename(new, target).map(|()| false).map_err(renamed)
            }
            Err(error) => Err(renamed(error.into())),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.done {
            // A folder that cannot be removed now is swept by the next save.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// An old checkpoint that was replaced. It has a temporary name that is not taken for a checkpoint. If the process ends
/// before it is removed, the next save sweeps it.
#[derive(Debug)]
#[must_use = "it takes space until it is removed"]
pub struct Replaced {
    path: PathBuf,
    /// Lock that keeps other runs from sweeping the folder.
    _lock: Option<File>,
}

impl Replaced {
    fn new(path: PathBuf) -> Self {
        let lock = File::open(&path).ok().inspect(|folder| {
            let _ = folder.try_lock();
        });
        Self { path, _lock: lock }
    }

    /// Removes the folder. It is not a checkpoint any more, so it may be removed file by file.
    ///
    /// # Errors
    /// Fails with [`Error::Io`] if the folder cannot be removed.
    pub fn remove(self) -> Result<(), Error> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", &self.path)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Checks that the target does not exist, or is a checkpoint or an empty folder: nothing else of the user's may be
/// replaced.
fn check_target(target: &Path) -> Result<(), Error> {
    let occupied = |fact: String| Error::Occupied { path: target.to_owned(), fact };
    let mut entries = match fs::read_dir(target) {
        Ok(entries) => entries,
        Err(error) => {
            return match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                std::io::ErrorKind::NotADirectory => Err(occupied("it is a file".into())),
                _ => Err(Error::io("read", target)(error)),
            };
        }
    };
    if target.join(MANIFEST).is_file() || entries.next().is_none() {
        return Ok(());
    }
    Err(occupied("it holds files that are not a checkpoint's".into()))
}

pub(crate) fn flush_folder(folder: &Path) -> Result<(), Error> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::io("flush", folder))
}

/// Suffix of folders that are being written or removed.
pub(crate) const STAGING: &str = ".partial";
