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

/// The numbers of all texts, one after the other, little-endian.
pub(crate) enum Store {
    Memory(Vec<u8>, Width),
    /// In a file from an offset on. It is read at offsets, not mapped: a file that is cut short meanwhile is then an
    /// error, where a map would end the process with SIGBUS, and the page cache holds it once for all ranks either way.
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

    /// Gives `count` numbers from the one with number `first` on to `visit`.
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

    /// Gives `count` numbers from the one with number `first` on to `visit`, as bytes, in pieces.
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

    /// The error where a number is none of the corpus.
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

/// A multiple of both widths.
const BUFFER: usize = 16 << 10;
