//! Archives, some of them open.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::index::Span;
use crate::source::{Hasher, reserve};
use crate::{ImageError, Result};

/// Archives that are opened when they are read. At most [`MAX_OPEN`] stay open: a data set may have
/// more archives than a process may open files.
#[derive(Debug)]
pub(super) struct Shards {
    paths: Vec<PathBuf>,
    facts: Vec<ShardFacts>,
    /// What is in the archives that are compressed.
    unpacked: Option<Arc<File>>,
    /// An archive is open in the slot of its number modulo their count, or not at all.
    open: Vec<Slot>,
}

type Slot = Mutex<Option<(u32, Arc<File>)>>;

impl Shards {
    pub(super) fn new(paths: Vec<PathBuf>, facts: Vec<ShardFacts>, unpacked: Option<File>) -> Self {
        let unpacked = unpacked.map(Arc::new);
        let open = (0..paths.len().min(MAX_OPEN)).map(|_| Mutex::default()).collect();
        Self { paths, facts, unpacked, open }
    }

    pub(super) fn version(&self, shard: u32) -> u64 {
        self.facts.get(shard as usize).map_or(0, |facts| facts.version)
    }

    pub(super) fn is_unpacked(&self, shard: u32) -> bool {
        self.facts.get(shard as usize).is_some_and(|facts| facts.unpacked)
    }

    pub(super) fn path(&self, shard: u32) -> Option<&Path> {
        self.paths.get(shard as usize).map(PathBuf::as_path)
    }

    /// Reads a stretch of an archive into `buffer`; `name` is for errors.
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

    /// Returns an archive, open.
    fn file(&self, shard: u32) -> std::io::Result<Arc<File>> {
        if let (true, Some(file)) = (self.is_unpacked(shard), &self.unpacked) {
            return Ok(Arc::clone(file));
        }
        let slot = self.open.get(shard as usize % self.open.len().max(1));
        let (Some(slot), Some(path)) = (slot, self.path(shard)) else {
            return Err(std::io::ErrorKind::NotFound.into());
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.as_ref() {
            Some((open, file)) if *open == shard => Ok(Arc::clone(file)),
            _ => {
                let file = Arc::new(File::open(path)?);
                *slot = Some((shard, Arc::clone(&file)));
                Ok(file)
            }
        }
    }

    pub(super) fn hash(&self, hasher: &mut Hasher) {
        for (path, facts) in self.paths.iter().zip(&self.facts) {
            hasher.bytes(path.file_name().unwrap_or_default().as_bytes());
            hasher.number(facts.bytes);
        }
    }
}

/// What is known of an archive since it was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShardFacts {
    /// Of its file.
    pub(super) bytes: u64,
    pub(super) version: u64,
    /// Whether its members are in the file of [`Unpacked`], not in its own.
    pub(super) unpacked: bool,
}

/// A file without a name for the members of compressed archives.
#[derive(Debug, Default)]
pub(super) struct Unpacked {
    /// With the bytes that are written.
    file: Mutex<Option<(File, u64)>>,
}

impl Unpacked {
    /// Writes a member, and returns where it lies.
    pub(super) fn add(&self, bytes: &[u8]) -> std::io::Result<Span> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, end) = match &mut *file {
            Some(file) => file,
            empty => empty.insert((tempfile::tempfile()?, 0)),
        };
        let span = Span { offset: *end, bytes: bytes.len() as u64 };
        file.write_all_at(bytes, span.offset)?;
        *end += span.bytes;
        Ok(span)
    }

    pub(super) fn into_file(self) -> Option<File> {
        let file = self.file.into_inner().unwrap_or_else(PoisonError::into_inner);
        file.map(|(file, _)| file)
    }
}

const MAX_OPEN: usize = 128;
