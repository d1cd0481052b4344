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
    sizes: Vec<u64>,
    /// An archive is open in the slot of its number modulo their count, or not at all.
    open: Vec<Slot>,
}

type Slot = Mutex<Option<(u32, Arc<File>)>>;

impl Shards {
    pub(super) fn new(paths: Vec<PathBuf>, sizes: Vec<u64>) -> Self {
        let open = (0..paths.len().min(MAX_OPEN)).map(|_| Mutex::default()).collect();
        Self { paths, sizes, open }
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
        for (path, size) in self.paths.iter().zip(&self.sizes) {
            hasher.bytes(path.file_name().unwrap_or_default().as_bytes());
            hasher.number(*size);
        }
    }
}

const MAX_OPEN: usize = 128;
