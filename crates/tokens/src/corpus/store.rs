//! Storage of the token indices of a corpus: in memory or in a file.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::files::io_error;
use crate::{Error, Result};

/// Number of bytes of a token index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    Two,
    Four,
}

impl Width {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// Returns the number of distinct indices that fit.
    pub(crate) const fn numbers(self) -> usize {
        match self {
            Self::Two => 1 << 16,
            Self::Four => u32::MAX as usize,
        }
    }
}

/// Numbers of all texts, concatenated, little-endian.
pub(crate) enum Store {
    Memory(Vec<u8>, Width),
    /// In a file from an offset on. It is read at offsets, not mapped: if the file is truncated in the meantime, a read
    /// returns an error, whereas a map would end the process with SIGBUS. The page cache holds it once for all ranks in
    /// either case.
    File {
        file: File,
        path: PathBuf,
        start: u64,
        width: Width,
    },
}

impl Store {
    pub(crate) fn width(&self) -> Width {
        match self {
            Self::Memory(_, width) | Self::File { width, .. } => *width,
        }
    }

    /// Passes `count` numbers, beginning with the one at index `first`, to `visit`.
    pub(super) fn read(
        &self,
        first: u64,
        count: usize,
        mut visit: impl FnMut(u32) -> Result<()>,
    ) -> Result<()> {
        let width = self.width();
        let mut decode = |bytes: &[u8]| match width {
            Width::Two => {
                let (numbers, _) = bytes.as_chunks();
                numbers.iter().try_for_each(|number| visit(u16::from_le_bytes(*number).into()))
            }
            Width::Four => {
                let (numbers, _) = bytes.as_chunks();
                numbers.iter().try_for_each(|number| visit(u32::from_le_bytes(*number)))
            }
        };
        self.pieces(first, count, &mut decode)
    }

    /// Passes `count` numbers, beginning with the one at index `first`, to `visit` in pieces of bytes.
    pub(crate) fn pieces(
        &self,
        first: u64,
        count: usize,
        mut visit: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let each = self.width().bytes();
        match self {
            Self::Memory(bytes, _) => {
                let start = usize::try_from(first).unwrap_or(usize::MAX).saturating_mul(each);
                let end = start.saturating_add(count.saturating_mul(each));
                visit(bytes.get(start..end).ok_or_else(|| self.damaged())?)
            }
            Self::File { file, path, start, .. } => {
                let mut buffer = [0; BUFFER];
                let mut offset = start + first * each as u64;
                let mut left = count * each;
                while left > 0 {
                    let piece = &mut buffer[..left.min(BUFFER)];
                    file.read_exact_at(piece, offset).map_err(io_error(path))?;
                    visit(piece)?;
                    offset += piece.len() as u64;
                    left -= piece.len();
                }
                Ok(())
            }
        }
    }

    /// Returns the error for a number that the corpus does not have.
    pub(super) fn damaged(&self) -> Error {
        let path = match self {
            Self::Memory(..) => "the corpus in memory".into(),
            Self::File { path, .. } => path.clone(),
        };
        Error::Format { path, detail: "a text has a token that the list of tokens lacks".into() }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(bytes, width) => {
                f.debug_tuple("Memory").field(&bytes.len()).field(width).finish()
            }
            Self::File { path, width, .. } => {
                f.debug_tuple("File").field(path).field(width).finish()
            }
        }
    }
}

/// Buffer size in bytes: a multiple of both widths.
const BUFFER: usize = 16 << 10;
