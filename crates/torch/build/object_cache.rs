//! Cache of compiled C++: a folder of the user's that all projects share.
//!
//! The border takes a minute of processor time, and its objects depend on nothing of a project: on texts, flags, the
//! compiler and libtorch's headers. A hash of these ([`Inputs`]) is the name of a file in [`ObjectCache`].

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

/// Number of archives that the cache keeps, the most recently used ones: release and debug, for CPUs and CUDA, of two
/// versions. One takes 6 to 25 MB.
const KEPT: usize = 8;
/// Extension of the cached archives.
const EXTENSION: &str = "objects";
/// Extension of archives that are being written.
const UNFINISHED: &str = "unfinished";
/// Age at which an unfinished archive was left by a process that no longer writes it.
const ABANDONED: Duration = Duration::from_secs(3600);
/// First bytes of a cached archive. A new format needs another number.
const MAGIC: &[u8] = b"brigade objects 1\n";
/// Length of a SHA-256 in bytes.
const DIGEST: usize = 32;

/// Hash of everything that the compiled objects depend on.
#[derive(Debug)]
pub(crate) struct Inputs(Sha256);

impl Inputs {
    /// Returns the hash of nothing.
    pub(crate) fn new() -> Self {
        Self(Sha256::new())
    }

    /// Adds a named input. Lengths are hashed, too, so that no two lists of inputs are the same bytes.
    pub(crate) fn add(&mut self, name: &str, bytes: &[u8]) {
        for part in [name.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// Adds the names and contents of all files in a folder and its subfolders.
    ///
    /// # Errors
    /// Fails if the folder or a file cannot be read.
    pub(crate) fn add_contents(&mut self, folder: &Path) -> io::Result<()> {
        for path in files(folder)? {
            self.add(&relative(&path, folder), &fs::read(&path)?);
        }
        Ok(())
    }

    /// Adds the names and sizes of all files in a folder and its subfolders: ten thousand headers are not read.
    ///
    /// # Errors
    /// Fails if the folder cannot be read.
    pub(crate) fn add_sizes(&mut self, folder: &Path) -> io::Result<()> {
        for path in files(folder)? {
            let size = fs::metadata(&path)?.len();
            self.add(&relative(&path, folder), &size.to_le_bytes());
        }
        Ok(())
    }

    /// Returns the hash as 64 hexadecimal digits: the key of the objects.
    pub(crate) fn key(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Folder of compiled archives, each with its checksum.
#[derive(Debug)]
pub(crate) struct ObjectCache {
    folder: PathBuf,
}

impl ObjectCache {
    /// Returns the user's cache: `$XDG_CACHE_HOME/brigade/objects`, by default in `~/.cache`, or the folder that
    /// `BRIGADE_OBJECT_CACHE` names. `None` if that variable is empty, or the user has no home folder.
    pub(crate) fn of_user() -> Option<Self> {
        if let Some(folder) = env::var_os("BRIGADE_OBJECT_CACHE") {
            return (!folder.is_empty()).then(|| Self::at(PathBuf::from(folder)));
        }
        // A relative path in the variable is ignored (XDG base directory specification).
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
        let cache = cache.or_else(|| Some(env::home_dir()?.join(".cache")))?;
        Some(Self::at(cache.join("brigade").join("objects")))
    }

    /// Returns a cache in this folder, which need not exist.
    pub(crate) fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Copies the archive of a key to `to`. Returns `false`, and writes nothing, if the cache does not contain it, or
    /// contains a damaged one.
    ///
    /// # Errors
    /// Fails if `to` cannot be written.
    pub(crate) fn load(&self, key: &str, to: &Path) -> io::Result<bool> {
        let path = self.path(key);
        let Ok(bytes) = fs::read(&path) else { return Ok(false) };
        let Some(archive) = checked(&bytes) else { return Ok(false) };
        fs::write(to, archive)?;
        // The most recently used ones are kept. A cache that cannot be written is read all the same.
        let _ = fs::File::options()
            .append(true)
            .open(&path)
            .and_then(|file| file.set_modified(SystemTime::now()));
        Ok(true)
    }

    /// Stores an archive under its key, whole or not at all, and removes the least recently used ones.
    ///
    /// # Errors
    /// Fails if the archive cannot be read, or the folder cannot be written.
    pub(crate) fn store(&self, key: &str, archive: &Path) -> io::Result<()> {
        let bytes = fs::read(archive)?;
        fs::create_dir_all(&self.folder)?;
        let name = format!("{key}.{}.{UNFINISHED}", std::process::id());
        let unfinished = self.folder.join(name);
        let written = fs::File::create(&unfinished)
            .and_then(|mut file| {
                file.write_all(MAGIC)?;
                file.write_all(&Sha256::digest(&bytes))?;
                file.write_all(&bytes)?;
                // Else a power failure after the rename leaves a file without its content.
                file.sync_all()
            })
            .and_then(|()| fs::rename(&unfinished, self.path(key)));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        self.prune();
        written
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(key).with_extension(EXTENSION)
    }

    /// Removes the least recently used archives, and what interrupted builds have left. Another process may do the
    /// same at the same time: files that are already gone are not an error.
    fn prune(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        let mut archives = Vec::new();
        for entry in entries.flatten() {
            let path = entry.path();
            let Ok(used) = entry.metadata().and_then(|it| it.modified()) else { continue };
            match path.extension().and_then(|it| it.to_str()) {
                Some(EXTENSION) => archives.push((used, path)),
                Some(UNFINISHED) if used.elapsed().is_ok_and(|age| age > ABANDONED) => {
                    let _ = fs::remove_file(path);
                }
                _ => {}
            }
        }
        archives.sort();
        let surplus = archives.len().saturating_sub(KEPT);
        for (_, path) in archives.drain(..surplus) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns the archive in the bytes of a cached file, if its checksum is right.
fn checked(bytes: &[u8]) -> Option<&[u8]> {
    let (digest, archive) = bytes.strip_prefix(MAGIC)?.split_at_checked(DIGEST)?;
    (Sha256::digest(archive)[..] == *digest).then_some(archive)
}

/// Returns the paths of all files in a folder and its subfolders, sorted.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            // Links to folders are not followed: they could lead back.
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else if entry.path().is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

fn relative(path: &Path, folder: &Path) -> String {
    path.strip_prefix(folder).unwrap_or(path).to_string_lossy().into_owned()
}
