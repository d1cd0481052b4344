//! Archives, some of which are open.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::image_source::{Hasher, reserve};
use crate::{ImageError, Result};

/// A range of bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Archives that are opened when they are read. At most [`MAX_OPEN`] stay open, because a dataset may have more
/// archives than a process may open files.
#[derive(Debug)]
pub(super) struct Shards {
    paths: Vec<PathBuf>,
    facts: Vec<ShardFacts>,
    /// The unpacked members of compressed archives.
    unpacked: Option<Arc<File>>,
    /// Open archives. An archive can only be open in the slot of its number modulo the number of slots.
    open: Vec<Slot>,
}

type Slot = Mutex<Option<(u32, Arc<File>)>>;

impl Shards {
    pub(super) fn new(
        paths: Vec<PathBuf>,
        facts: Vec<ShardFacts>,
        unpacked: Option<Arc<File>>,
    ) -> Self {
        let open = (0..paths.len().min(MAX_OPEN)).map(|_| Mutex::default()).collect();
        Self { paths, facts, unpacked, open }
    }

    pub(super) fn version(&self, shard: u32) -> u64 {
        self.facts.get(shard as usize).map_or(0, |facts| facts.version)
    }

    pub(super) fn is_unpacked(&self, shard: u32) -> bool {
        self.facts.get(shard as usize).is_some_and(|facts| facts.unpacked)
    }

    /// Returns the size of the file for members of compressed archives.
    #[cfg(test)]
    pub(super) fn unpacked_bytes(&self) -> u64 {
        self.unpacked.as_ref().map_or(0, |file| file.metadata().unwrap().len())
    }

    pub(super) fn path(&self, shard: u32) -> Option<&Path> {
        self.paths.get(shard as usize).map(PathBuf::as_path)
    }

    /// Reads a range of an archive into `buffer`. `name` is used in error messages.
    pub(super) fn read(
        &self,
        shard: u32,
        span: Span,
        name: &str,
        buffer: &mut Vec<u8>,
    ) -> Result<()> {
        reserve(buffer, span.bytes, name)?;
        let path = || self.path(shard).unwrap_or_else(|| Path::new(name)).to_owned();
        self.file(shard)
            .and_then(|file| file.read_exact_at(buffer, span.offset))
            .map_err(|cause| ImageError::Read { path: path(), cause })
    }

    /// Returns the open file of an archive.
    fn file(&self, shard: u32) -> std::io::Result<Arc<File>> {
        if let (true, Some(file)) = (self.is_unpacked(shard), &self.unpacked) {
            return Ok(Arc::clone(file));
        }
        let slot = self.open.get(shard as usize % self.open.len().max(1));
        let (Some(slot), Some(path)) = (slot, self.path(shard)) else {
            return Err(std::io::ErrorKind::NotFound.into());
        };
        let mut slot = slot.lock();
        match slot.as_ref() {
            Some((open, file)) if *open == shard => Ok(Arc::clone(file)),
            _ => {
                let file = Arc::new(File::open(path)?);
                *slot = Some((shard, Arc::clone(&file)));
                Ok(file)
            }
        }
    }

    #[cfg(feature = "parquet")]
    pub(super) fn hold_open(&self) -> Result<()> {
        for (shard, path) in (0..).zip(&self.paths) {
            self.file(shard).map_err(|cause| ImageError::Read { path: path.clone(), cause })?;
        }
        Ok(())
    }

    pub(super) fn hash(&self, hasher: &mut Hasher) {
        for (path, facts) in self.paths.iter().zip(&self.facts) {
            hasher.bytes(path.file_name().unwrap_or_default().as_bytes());
            hasher.number(facts.bytes);
        }
    }
}

/// Attributes of an archive at the time when it was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShardFacts {
    /// Size of the file in bytes.
    pub(super) bytes: u64,
    pub(super) version: u64,
    /// `true` if its members are in the file of [`Unpacked`], not in its own.
    pub(super) unpacked: bool,
}

/// A file without a name, which contains members of compressed archives.
#[derive(Debug, Default)]
pub(super) struct Unpacked {
    /// The file, and the number of bytes that are written or reserved.
    file: Mutex<Option<(Arc<File>, u64)>>,
}

impl Unpacked {
    /// Writes a member of `bytes` bytes in pieces, and returns its position.
    pub(super) fn add(&self, bytes: u64, member: &mut impl Read) -> Result<Span, Unpacking> {
        let (file, offset) = self.reserve(bytes).map_err(Unpacking::Write)?;
        let mut piece = vec![0; bytes.min(PIECE) as usize];
        let mut written = 0;
        while written < bytes {
            let length = (bytes - written).min(PIECE);
            let piece = piece.get_mut(..length as usize).unwrap_or_default();
            member.read_exact(piece).map_err(Unpacking::Read)?;
            file.write_all_at(piece, offset + written).map_err(Unpacking::Write)?;
            written += length;
        }
        Ok(Span { offset, bytes })
    }

    /// Reserves a range of the file, and returns its start.
    fn reserve(&self, bytes: u64) -> std::io::Result<(Arc<File>, u64)> {
        let mut file = self.file.lock();
        let (file, end) = match &mut *file {
            Some(file) => file,
            empty => empty.insert((Arc::new(tempfile::tempfile()?), 0)),
        };
        let offset = *end;
        *end += bytes;
        Ok((Arc::clone(file), offset))
    }

    pub(super) fn into_file(self) -> Option<Arc<File>> {
        let file = self.file.into_inner();
        file.map(|(file, _)| file)
    }
}

/// Reason why a member could not be unpacked.
#[derive(Debug)]
pub(super) enum Unpacking {
    /// The member could not be read from the archive.
    Read(std::io::Error),
    /// The temporary file could not be created or written.
    Write(std::io::Error),
}

pub(super) const MAX_OPEN: usize = 128;
/// Number of bytes of a member that are in memory at a time.
const PIECE: u64 = 1 << 20;
