//! Files that are written once, with a checksum.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::direct::{Direct, allocate};
use crate::error::Error;
use crate::file_name::FileName;

/// Size and checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// CRC-32 of the contents, in hexadecimal, as in zip and gzip. Computed with the processor's carry-less
    /// multiplication, which is faster than any disk.
    pub crc32: String,
}

impl FileFacts {
    /// Computes size and checksum of an existing file. With `flush`, flushes it to the disk, to survive a power
    /// failure.
    ///
    /// # Errors
    /// Fails with [`Error::Io`] if the file cannot be read or flushed.
    pub fn of(path: &Path, flush: bool) -> Result<Self, Error> {
        let file = File::open(path).map_err(Error::io("read", path))?;
        if flush {
            file.sync_all().map_err(Error::io("flush", path))?;
        }
        let mut crc = crc32fast::Hasher::new();
        // Fits into the second-level cache, so that the checksum reads what the system has just copied.
        let mut piece = vec![0; PIECE_BYTES / 2];
        let mut bytes = 0u64;
        loop {
            match (&file).read(&mut piece).map_err(Error::io("read", path))? {
                0 => return Ok(Self { bytes, crc32: format!("{:08x}", crc.finalize()) }),
                read => {
                    crc.update(&piece[..read]);
                    bytes += read as u64;
                }
            }
        }
    }
}

/// Lists the names of the files in a folder, sorted.
///
/// # Errors
/// Fails with [`Error::Io`] if the folder cannot be read.
pub fn files(folder: &Path) -> Result<Vec<FileName>, Error> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let entry = entry.map_err(Error::io("read", folder))?;
        if entry.path().is_file() {
            names.push(FileName::new(entry.file_name().to_string_lossy())?);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// A new file that is written with a checksum: bytes go straight to the system, and the checksum is computed while they
/// are in the processor's cache.
#[derive(Debug)]
pub struct ChecksumWriter {
    path: PathBuf,
    sink: Sink,
    crc: crc32fast::Hasher,
    bytes: u64,
}

#[derive(Debug)]
enum Sink {
    Cached(File),
    Direct(Direct),
}

impl ChecksumWriter {
    /// Creates a file, which must not exist.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], also if the file exists.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(Error::io("write", &path))?;
        Ok(Self::into_sink(path, Sink::Cached(file)))
    }

    /// Creates a file like [`ChecksumWriter::create`], with a known size. Allocates the space of a large file, and of
    /// one that will be flushed, so that a full disk fails at once. A large file is written with direct I/O, which
    /// bypasses the page cache, by separate threads if the file system supports that, which takes 24 MB of memory until
    /// the end.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], also if the file exists or the disk is full.
    pub fn create_sized(path: impl Into<PathBuf>, bytes: u64, flush: bool) -> Result<Self, Error> {
        let path = path.into();
        if bytes >= LEAST_DIRECT_BYTES {
            let direct = Direct::create(&path, bytes, flush).map_err(Error::io("write", &path))?;
            if let Some(direct) = direct {
                return Ok(Self::into_sink(path, Sink::Direct(direct)));
            }
        }
        let writing = Self::create(path)?;
        // Without a flush the data stays in the cache for now, and finding its place on the disk can wait, too.
        if flush && let Sink::Cached(file) = &writing.sink {
            allocate(file, bytes).map_err(Error::io("write", &writing.path))?;
        }
        Ok(writing)
    }

    /// Returns `true` if bytes are written with direct I/O, which bypasses the page cache. `false` for small files, and
    /// on file systems without direct I/O. The contents are the same either way.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        matches!(self.sink, Sink::Direct(_))
    }

    fn into_sink(path: PathBuf, sink: Sink) -> Self {
        Self { path, sink, crc: crc32fast::Hasher::new(), bytes: 0 }
    }

    /// Appends bytes to the file.
    ///
    /// # Errors
    /// Fails with [`Error::Io`] if the bytes cannot be written.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.write_all(piece).map_err(Error::io("write", &self.path))?;
        }
        Ok(())
    }

    /// Completes the file and returns its size and checksum. With `flush`, flushes it to the disk, to survive a power
    /// failure.
    ///
    /// # Errors
    /// Fails with [`Error::Io`] if the file cannot be written or flushed.
    pub fn finish(self, flush: bool) -> Result<FileFacts, Error> {
        match self.sink {
            Sink::Direct(direct) => {
                direct.finish(self.bytes).map_err(Error::io("write", &self.path))?;
            }
            Sink::Cached(file) if flush => {
                file.sync_all().map_err(Error::io("flush", &self.path))?;
            }
            Sink::Cached(_) => {}
        }
        Ok(FileFacts { bytes: self.bytes, crc32: format!("{:08x}", self.crc.finalize()) })
    }
}

impl Write for ChecksumWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match &mut self.sink {
            Sink::Cached(file) => file.write(bytes)?,
            Sink::Direct(direct) => direct.put(bytes).map(|()| bytes.len())?,
        };
        self.crc.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a whole small file.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write_file(path: &Path, text: &[u8], flush: bool) -> Result<FileFacts, Error> {
    let mut file = ChecksumWriter::create(path)?;
    file.put(text)?;
    file.finish(flush)
}

/// Size of a piece in bytes: large enough to make system calls negligible, small enough for the second-level cache.
const PIECE_BYTES: usize = 1 << 20;
/// Minimum size of a file written with direct I/O. Below, threads and buffers cost more than they gain.
const LEAST_DIRECT_BYTES: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let content: Vec<u8> = (0..20 << 20).map(|i: u32| (i % 251) as u8).collect();
        // Alternates small and large pieces, through the cache and past it.
        for (name, flush) in [("not flushed", false), ("flushed", true)] {
            let path = folder.path().join(name);
            let mut out = ChecksumWriter::create_sized(&path, content.len() as u64, flush).unwrap();
            let mut rest = content.as_slice();
            for length in [1, PIECE_BYTES, 7, PIECE_BYTES + 5, usize::MAX] {
                let (now, later) = rest.split_at(length.min(rest.len()));
                out.put(now).unwrap();
                rest = later;
            }
            let facts = out.finish(flush).unwrap();
            assert_eq!(facts, FileFacts::of(&path, false).unwrap());
            assert!(std::fs::read(&path).unwrap() == content);
        }
    }
}
