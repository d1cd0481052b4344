//! Archives from strangers: unpacked into a folder that appears whole or not at all.
//!
//! An archive is unpacked into a folder beside its place, which is then renamed. Absolute paths, `..`, links that
//! lead out of the folder, devices, and sizes and numbers of files above a limit are refused. Links are made last, so
//! nothing is written through one.

mod tar;
mod tree;
mod zip;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::DatasetError;
use crate::lock::open_locked;
use brigade_rank_env::text::counted;
use tree::Tree;

/// Unpacks an archive (tar, tar.gz or zip, by its content) into a folder of its own.
///
/// The archive may come from a stranger. Refused are absolute names and names with `..`, links that lead out of
/// the folder, devices, pipes and sockets, encrypted and sparse files, and an archive that becomes larger, or more
/// files, than the limits. Of an entry's mode only whether it is executable is kept; owners and times are not.
///
/// Where everything in the archive lies in one folder, that folder is what appears, under the new name.
/// It is unpacked beside its place, under the name `.NAME.extracting`, and renamed when it is whole and on the
/// disk; what a killed process leaves behind is removed by the next call.
///
/// ```
/// use brigade_datasets::Extraction;
///
/// # let home = tempfile::tempdir()?;
/// # let archive = home.path().join("pets-1.0.tar");
/// # let mut tar = tar::Builder::new(std::fs::File::create(&archive)?);
/// # let mut header = tar::Header::new_gnu();
/// # header.set_size(4);
/// # header.set_mode(0o644);
/// # header.set_cksum();
/// # tar.append_data(&mut header, "pets-1.0/names.txt", &b"Rex\n"[..])?;
/// # tar.into_inner()?;
/// // An archive with the one file pets-1.0/names.txt.
/// let folder = home.path().join("pets");
/// Extraction::new().max_bytes(1 << 30).extract(&archive, &folder)?;
/// assert_eq!(std::fs::read_to_string(folder.join("names.txt"))?, "Rex\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Extraction {
    max_bytes: Option<u64>,
    max_files: Option<u64>,
    replace: bool,
}

impl Extraction {
    /// Begins with the limits that follow from the archive's size, and leaves a folder alone that is there.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many bytes all files together may have; else a hundred times the archive's and a gigabyte.
    #[must_use]
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = Some(bytes);
        self
    }

    /// Sets how many files, folders and links there may be; else one for every 32 bytes of the archive, and
    /// 100,000.
    #[must_use]
    pub fn max_files(mut self, files: u64) -> Self {
        self.max_files = Some(files);
        self
    }

    /// Sets whether a folder that is there already is replaced. It stays until the new one is whole.
    #[must_use]
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// Unpacks the file `archive` as `folder`, unless there is one. One process at a time does this; the others
    /// wait, and find it done.
    ///
    /// # Errors
    /// When the archive cannot be read, is damaged or none, holds what is refused or exceeds a limit, and when
    /// the folder cannot be written. Nothing is left behind then.
    pub fn extract(
        &self,
        archive: impl AsRef<Path>,
        folder: impl AsRef<Path>,
    ) -> Result<(), DatasetError> {
        let (archive, folder) = (archive.as_ref(), folder.as_ref());
        let read_error = |cause| DatasetError::Read { path: archive.into(), cause };
        let file = File::open(archive).map_err(read_error)?;
        let bytes = file.metadata().map_err(read_error)?.len();
        let limits = self.limits(bytes);
        let failed = |cause| DatasetError::Write { path: folder.into(), bytes: 0, cause };
        let Some(name) = folder.file_name() else {
            return Err(failed(ErrorKind::InvalidFilename.into()));
        };
        if !self.replace && folder.exists() {
            return Ok(());
        }
        let around = match folder.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(around).map_err(failed)?;
        let mut work = OsString::from(".");
        work.push(name);
        work.push(".extracting");
        let work = Work::new(around.join(work)).map_err(failed)?;
        // Another process may have had the lock until now.
        if !self.replace && folder.exists() {
            return Ok(());
        }
        let content = work.path.join("content");
        fs::create_dir(&content).map_err(failed)?;
        tracing::info!(archive = %archive.display(), folder = %folder.display(), bytes, "unpacking");
        let mut tree = Tree::new(archive, &content, limits);
        unpack(file, bytes, &mut tree)?;
        let top = tree.finish()?;
        // One call for all of the file system costs less than one for each of many small files.
        rustix::fs::syncfs(&work.lock).map_err(|cause| failed(cause.into()))?;
        let replaced = work.path.join("replaced");
        if fs::symlink_metadata(folder).is_ok() {
            fs::rename(folder, &replaced).map_err(failed)?;
        }
        fs::rename(top, folder).map_err(|cause| {
            // Does nothing where there was no folder.
            let _ = fs::rename(&replaced, folder);
            failed(cause)
        })
    }

    /// Those of an archive of this size.
    fn limits(&self, bytes: u64) -> Limits {
        let expanded = bytes.saturating_mul(EXPANSION).saturating_add(FREE_BYTES);
        Limits {
            bytes: self.max_bytes.unwrap_or(expanded),
            files: self.max_files.unwrap_or(bytes / BYTES_PER_FILE + FREE_FILES),
        }
    }
}

/// What an archive may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    bytes: u64,
    files: u64,
}

/// The folder in which an archive is unpacked, locked; removed in the end, whatever happens.
struct Work {
    path: PathBuf,
    lock: File,
    lock_path: PathBuf,
}

impl Work {
    /// Makes an empty one. What is there is of a process that was killed: nothing else has the lock.
    fn new(path: PathBuf) -> io::Result<Self> {
        let lock_path = path.with_added_extension("lock");
        let lock = open_locked(&lock_path)?;
        let work = Self { path, lock, lock_path };
        match fs::remove_dir_all(&work.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::create_dir(&work.path)?;
        Ok(work)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let removed =
            fs::remove_dir_all(&self.path).and_then(|()| fs::remove_file(&self.lock_path));
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "a folder cannot be removed");
        }
    }
}

fn unpack(file: File, bytes: u64, tree: &mut Tree<'_>) -> Result<(), DatasetError> {
    let archive = tree.archive();
    let mut start = Vec::new();
    let read = (&file).take(START_BYTES).read_to_end(&mut start);
    read.map_err(|cause| DatasetError::Read { path: archive.into(), cause })?;
    if start.starts_with(b"PK\x03\x04") || start.starts_with(b"PK\x05\x06") {
        zip::unpack(file, tree)
    } else if start.starts_with(&[0x1f, 0x8b]) {
        tar::unpack(tar::Gzip::new(BufReader::new((&*start).chain(file))), tree)
    } else if tar::begins(&start) {
        tar::unpack((&*start).chain(file), tree)
    } else {
        let start = String::from_utf8_lossy(start.get(..SHOWN_BYTES).unwrap_or(&start));
        let found = format!("{} that begin with {start:?}", counted(bytes, "byte"));
        Err(DatasetError::NotAnArchive { path: archive.into(), found })
    }
}

/// How many times its size an archive may become. Deflate can make 1032 bytes of one; texts become ten times as
/// large at most.
const EXPANSION: u64 = 100;
/// Beside that, for small archives.
const FREE_BYTES: u64 = 1 << 30;
/// Small images take some 200 bytes each.
const BYTES_PER_FILE: u64 = 32;
const FREE_FILES: u64 = 100_000;
/// Of the first header of a tar archive.
const START_BYTES: u64 = 512;
/// Of what is no archive, in the error.
const SHOWN_BYTES: usize = 40;

#[cfg(test)]
mod tests;
