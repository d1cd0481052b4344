//! The cache of compiled code and of measured choices: a folder of the user's that all programs share.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::file::Variant;
use crate::nvrtc::{CompileError, Compiler};

mod choices;

pub use choices::{KeptChoice, KeptChoices};

/// Folder of compiled kernels: `$XDG_CACHE_HOME/brigade/kernels`, by default in `~/.cache`.
///
/// Each entry is a file of its own, written under a temporary name and renamed, so a reader finds a whole entry or
/// none. A damaged entry is compiled again. Without a folder that can be written, everything is compiled at each start.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Option<PathBuf>,
    /// Longest time to wait for another process that compiles the same variant.
    patience: Duration,
}

/// Compiled code of a variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    /// Machine code for the GPU (cubin).
    pub bytes: Vec<u8>,
    /// Origin of the code.
    pub origin: Origin,
    /// Message for the user: the cached file was damaged, or the folder cannot be written.
    pub remark: Option<String>,
}

/// Origin of compiled code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Read from the cache.
    Cached,
    /// Compiled by this call.
    Compiled,
}

/// First bytes of an entry, with the version of the layout. The key, the SHA-256 of the code and the code follow.
const MAGIC: [u8; 16] = *b"brigade kernel\x00\x01";
const HEAD: usize = MAGIC.len() + 32 + 32;
/// Largest entry that is read: a file of kernels compiles to less than 1 MB.
const MAX_BYTES: u64 = 64 << 20;
/// Compiling a file takes a second; a slow host with many ranks takes some more.
const PATIENCE: Duration = Duration::from_secs(30);

/// Result of looking for an entry.
enum Entry {
    Found(Vec<u8>),
    Missing,
    /// The file is not an intact entry of this key; with the reason.
    Damaged(String),
}

impl Cache {
    /// Returns the user's cache. Creates no files. If the user has no home folder and `XDG_CACHE_HOME` is not an
    /// absolute path, nothing is kept.
    #[must_use]
    pub fn of_user() -> Self {
        // A relative path in the variable is ignored (XDG base directory specification).
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
        let cache = cache.or_else(|| Some(env::home_dir()?.join(".cache")));
        Self { folder: cache.map(|it| it.join("brigade").join("kernels")), patience: PATIENCE }
    }

    /// Returns a cache in this folder, which is created when an entry is written.
    #[must_use]
    pub fn at(folder: PathBuf) -> Self {
        Self { folder: Some(folder), patience: PATIENCE }
    }

    /// Returns the folder, if there is one.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Returns the code of a variant: from the cache, or compiled and then kept. Of several processes or threads that
    /// need the same variant, one compiles it while the others wait.
    ///
    /// # Errors
    /// Fails if the variant cannot be compiled. A cache that cannot be read or written is not an error.
    pub fn code(&self, variant: &Variant, compiler: &dyn Compiler) -> Result<Code, CompileError> {
        let Some(folder) = &self.folder else {
            return Ok(Code::compiled(compiler.compile(variant)?, None));
        };
        let version = compiler.version();
        let key = variant.key(version);
        let path = folder.join(variant.file_name(version));
        if let Entry::Found(bytes) = read(&path, &key) {
            return Ok(Code { bytes, origin: Origin::Cached, remark: None });
        }
        // An entry that another process has written meanwhile is as good.
        let lock = Lock::take(&path.with_extension("lock"), self.patience);
        let damage = match read(&path, &key) {
            Entry::Found(bytes) => return Ok(Code { bytes, origin: Origin::Cached, remark: None }),
            Entry::Missing => None,
            Entry::Damaged(reason) => {
                Some(format!("{} {reason}; it is written again", path.display()))
            }
        };
        let bytes = compiler.compile(variant)?;
        let written = write(folder, &path, &key, &bytes);
        drop(lock);
        let remark = match written {
            Ok(()) => damage,
            Err(error) => Some(format!(
                "cannot keep compiled kernels in {}: {error}; they are compiled again at the next start",
                folder.display()
            )),
        };
        Ok(Code::compiled(bytes, remark))
    }
}

impl Code {
    fn compiled(bytes: Vec<u8>, remark: Option<String>) -> Self {
        Self { bytes, origin: Origin::Compiled, remark }
    }
}

fn read(path: &Path, key: &[u8; 32]) -> Entry {
    let entry = File::open(path).and_then(|file| {
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    });
    let entry = match entry {
        Ok(entry) => entry,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Entry::Missing,
        Err(error) => return Entry::Damaged(format!("cannot be read: {error}")),
    };
    let Some((head, code)) = entry.split_at_checked(HEAD) else {
        return Entry::Damaged("is truncated".to_owned());
    };
    let (magic, sums) = head.split_at(MAGIC.len());
    let (of_key, checksum) = sums.split_at(32);
    if magic != MAGIC || of_key != key {
        return Entry::Damaged("has other contents than its name says".to_owned());
    }
    if Sha256::digest(code).as_slice() != checksum {
        return Entry::Damaged("is damaged (wrong checksum)".to_owned());
    }
    Entry::Found(code.to_vec())
}

fn write(folder: &Path, path: &Path, key: &[u8; 32], code: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    // Deleted if anything fails.
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
    file.write_all(&MAGIC)?;
    file.write_all(key)?;
    file.write_all(&Sha256::digest(code))?;
    file.write_all(code)?;
    file.as_file().sync_data()?;
    // Other users read a folder that they share, such as one of an image.
    file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Lock of an entry while it is compiled. The kernel releases it when the process ends. It only saves work: two processes
/// that compile the same variant write equal files.
struct Lock {
    file: Option<File>,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock, or none if that takes longer than `patience` or the file cannot be made.
    fn take(path: &Path, patience: Duration) -> Self {
        let path = path.to_owned();
        let begun = Instant::now();
        if let Some(folder) = path.parent() {
            // A failure is found, and reported, when the entry is written.
            let _ = fs::create_dir_all(folder);
        }
        let Ok(file) = OpenOptions::new().create(true).truncate(false).write(true).open(&path)
        else {
            return Self { file: None, path };
        };
        loop {
            match file.try_lock() {
                Ok(()) => return Self { file: Some(file), path },
                Err(fs::TryLockError::WouldBlock) if begun.elapsed() < patience => {
                    thread::sleep(Duration::from_millis(10));
                }
                Err(_) => return Self { file: None, path },
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.file.is_some() {
            // A process that waits for the file has it open and finds the entry when it has the lock.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;
