//! Unpacking of untrusted archives into a folder that appears whole or not at all.
//!
//! An archive is unpacked into a temporary folder next to the target, which is then renamed. Absolute paths, `..`,
//! links that point out of the folder, devices, and sizes and numbers of files above a limit are refused. Links are
//! made last, so that nothing is written through one.

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

/// Unpacks an archive (tar, tar.gz or zip, recognized by its content) into a new folder.
///
/// The archive need not be trusted. Refused are absolute names and names with `..`, links that point out of the folder,
/// devices, pipes and sockets, encrypted and sparse files, and an archive with more bytes or more files than the
/// limits. Of an entry's mode only the executable bit is kept; owners and times are not.
///
/// If everything in the archive is in one folder, that folder is renamed to the target. The archive is unpacked next to
/// the target, under the name `.NAME.extracting`, and renamed when it is complete and synced to disk. The next call
/// removes what a killed process left behind.
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
    /// Creates options with limits that depend on the size of the archive, which do not replace an existing folder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum size of all files together in bytes. Defaults to a hundred times the archive's size plus one
    /// GiB.
    #[must_use]
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = Some(bytes);
        self
    }

    /// Sets the maximum number of files, folders and links. Defaults to one for every 32 bytes of the archive, plus
    /// 100,000.
    #[must_use]
    pub fn max_files(mut self, files: u64) -> Self {
        self.max_files = Some(files);
        self
    }

    /// Sets whether an existing folder is replaced. It stays until the new folder is complete. Defaults to `false`.
    #[must_use]
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// Unpacks the file `archive` as `folder`, unless that folder exists. One process at a time does this; other
    /// processes wait for it and then return at once.
    ///
    /// # Errors
    /// Fails if the archive cannot be read, is damaged or of another format, has an entry that is refused or exceeds a
    /// limit, or if the folder cannot be written. Nothing is left behind then.
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
        // Another process may have held the lock until now, and unpacked the archive.
        if !self.replace && folder.exists() {
            return Ok(());
        }
        let content = work.path.join("content");
        fs::create_dir(&content).map_err(failed)?;
        tracing::info!(archive = %archive.display(), folder = %folder.display(), bytes, "unpacking");
        let mut tree = Tree::new(archive, &content, limits);
        unpack(file, bytes, &mut tree)?;
        let top = tree.finish()?;
        // One call for the whole file system costs less than one for each of many small files.
        rustix::fs::syncfs(&work.lock).map_err(|cause| failed(cause.into()))?;
        let replaced = work.path.join("replaced");
        if fs::symlink_metadata(folder).is_ok() {
            fs::rename(folder, &replaced).map_err(failed)?;
        }
        fs::rename(top, folder).map_err(|cause| {
            // Does nothing if there was no folder.
            let _ = fs::rename(&replaced, folder);
            failed(cause)
        })
    }

    /// Returns the limits for an archive of this size.
    fn limits(&self, bytes: u64) -> Limits {
        let expanded = bytes.saturating_mul(EXPANSION).saturating_add(FREE_BYTES);
        Limits {
            bytes: self.max_bytes.unwrap_or(expanded),
            files: self.max_files.unwrap_or(bytes / BYTES_PER_FILE + FREE_FILES),
        }
    }
}

/// Limits on the size and the number of files of an unpacked archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    bytes: u64,
    files: u64,
}

/// The locked folder in which an archive is unpacked. It is removed when this is dropped.
struct Work {
    path: PathBuf,
    lock: File,
    lock_path: PathBuf,
}

impl Work {
    /// Creates an empty folder. An existing one is left from a process that was killed, because nothing else has the
    /// lock.
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

/// Factor by which an archive may grow. Deflate can expand one byte to 1032; text grows tenfold at most.
const EXPANSION: u64 = 100;
/// Added to that limit, for small archives.
const FREE_BYTES: u64 = 1 << 30;
/// Small images take some 200 bytes each.
const BYTES_PER_FILE: u64 = 32;
const FREE_FILES: u64 = 100_000;
/// Size of the first header of a tar archive.
const START_BYTES: u64 = 512;
/// Number of bytes of an unrecognized file that are shown in the error.
const SHOWN_BYTES: usize = 40;

#[cfg(test)]
mod tests;
