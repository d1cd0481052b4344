//! A folder that is being written, under a name that nothing takes for a checkpoint.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::manifest::{MANIFEST, Manifest};
use crate::error::Error;
use crate::layout::file::write_file;

/// A checkpoint that is being written. Dropped before [`Staging::commit`], it is removed.
///
/// The folder is locked (`flock`) for as long as its owner lives, so that others can tell it from one
/// that a killed run has left.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    target: PathBuf,
    lock: Option<File>,
    done: bool,
}

/// The name under which `target` is written: hidden, in the same folder, so that a rename is enough.
///
/// # Errors
/// [`Error::Unsupported`] for a path without a last part, such as `/` or `..`.
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
    /// Makes the folder, and those above it. `unique` tells it from other runs' of the same name.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Occupied`] when `target` is something other than a checkpoint or an
    /// empty folder.
    pub fn create(target: &Path, unique: &str) -> Result<Self, Error> {
        let path = staging_path(target, unique)?;
        check_target(target)?;
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(Error::io("make", parent))?;
        }
        fs::create_dir(&path).map_err(Error::io("make", &path))?;
        let mut staging = Self { path, target: target.to_owned(), lock: None, done: false };
        let lock = File::open(&staging.path).map_err(Error::io("open", &staging.path))?;
        // Where the file system has no locks, sweeping finds none either and leaves all alone.
        let _ = lock.try_lock();
        staging.lock = Some(lock);
        Ok(staging)
    }

    /// Where the files go.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the manifest and gives the folder its name. What had the name is removed afterwards.
    ///
    /// # Errors
    /// [`Error::Io`]; what had the name is still there then.
    pub fn commit(self, manifest: &Manifest, flush: bool) -> Result<(), Error> {
        self.replace(manifest, flush)?.map_or(Ok(()), Replaced::remove)
    }

    /// As [`Staging::commit`], and gives what had the name, under the other one. Where the file system tells the
    /// disk what is free at once, removing 1 GB takes a fifth of the time of writing it.
    ///
    /// # Errors
    /// As there.
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

    /// Takes the target's name; true when what had it is now under the other.
    fn exchange(&self) -> Result<bool, Error> {
        let renamed = Error::io("rename", &self.path);
        let (new, target) = (&self.path, &self.target);
        match renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(true),
            // Nothing has the name. An empty folder that appears meanwhile is replaced.
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
            // What cannot be removed now is swept by the next save.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// A checkpoint whose name another one has taken. It is under a name that nothing takes for a checkpoint; when the
/// process ends before it is removed, the next save sweeps it.
#[derive(Debug)]
#[must_use = "it takes space until it is removed"]
pub struct Replaced {
    path: PathBuf,
    /// As long as this is there, other runs do not sweep it.
    _lock: Option<File>,
}

impl Replaced {
    fn new(path: PathBuf) -> Self {
        let lock = File::open(&path).ok().inspect(|folder| {
            let _ = folder.try_lock();
        });
        Self { path, _lock: lock }
    }

    /// Removes it. It is not a checkpoint any more, so half of it may go first.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove(self) -> Result<(), Error> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", &self.path)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Only a checkpoint or an empty folder may be replaced: nothing else of the user's.
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

/// How the name of a folder ends that is being written or removed.
pub(crate) const STAGING: &str = ".partial";
