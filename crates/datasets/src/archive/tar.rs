//! Unpacking of tar archives, plain or gzip.

use std::cell::Cell;
use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;
use tar::{Archive, EntryType, Header};

use super::tree::Tree;
use crate::DatasetError;

/// Returns `true` if `start` is the first 512 bytes of a tar archive: a header with its checksum, which all variants
/// have.
pub(super) fn begins(start: &[u8]) -> bool {
    if start.len() != 512 {
        return false;
    }
    // The checksum is computed with spaces in its own field.
    let numbers = start.iter().enumerate();
    let sum =
        numbers.map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) });
    Header::from_byte_slice(start).cksum().is_ok_and(|expected| sum.sum::<u32>() == expected)
}

/// Unpacks all entries. Reads the archive to its end, because a gzip stream has its checksum there.
pub(super) fn unpack(source: impl Read, tree: &mut Tree<'_>) -> Result<(), DatasetError> {
    let header_bytes = Cell::new(0);
    let mut archive = Archive::new(Bounded { inner: source, left: &header_bytes });
    let mut entries = archive.entries().map_err(|cause| tree.damaged(cause))?;
    loop {
        // Long names are read into memory, so that they need a limit.
        header_bytes.set(MAX_HEADER_BYTES);
        let Some(entry) = entries.next() else { break };
        header_bytes.set(u64::MAX);
        let mut entry = entry.map_err(|cause| tree.damaged(cause))?;
        tree.entry()?;
        let name = entry.path_bytes().into_owned();
        let kind = entry.header().entry_type();
        let target = entry.link_name_bytes().map(|target| target.into_owned()).unwrap_or_default();
        match kind {
            // A folder in an old format without a type for folders.
            EntryType::Regular if name.ends_with(b"/") => tree.directory(&name)?,
            EntryType::Regular | EntryType::Continuous => {
                let executable = entry.header().mode().is_ok_and(|mode| mode & 0o111 != 0);
                tree.file(&name, executable, &mut entry)?;
            }
            EntryType::Directory => tree.directory(&name)?,
            EntryType::Link => tree.hard_link(&name, &target)?,
            EntryType::Symlink => tree.symlink(&name, &target)?,
            // Global attributes are not needed.
            EntryType::XGlobalHeader => {}
            kind => {
                let reason = match kind {
                    EntryType::Char | EntryType::Block => "it is a device".to_owned(),
                    EntryType::Fifo => "it is a pipe".to_owned(),
                    EntryType::GNUSparse => "it is a sparse file".to_owned(),
                    kind => format!("it is of the unknown type {:?}", char::from(kind.as_byte())),
                };
                return Err(tree.refused(&name, reason));
            }
        }
        tree.skip(&mut entry)?;
    }
    header_bytes.set(u64::MAX);
    tree.skip(archive.into_inner())
}

/// The content of a gzip file: of all its members, without any bytes after the last one, as `gzip -d` reads it.
pub(super) struct Gzip<R> {
    /// The current member; `None` after the last.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Gzip<R> {
    pub(super) fn new(file: R) -> Self {
        Self { member: Some(GzDecoder::new(file)) }
    }
}

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let count = member.read(to)?;
            if count > 0 || to.is_empty() {
                return Ok(count);
            }
            if let Some(member) = self.member.take() {
                let mut rest = member.into_inner();
                if rest.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
                    self.member = Some(GzDecoder::new(rest));
                }
            }
        }
        Ok(0)
    }
}

/// A reader that returns at most `left` bytes.
struct Bounded<'a, R> {
    inner: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other(format!(
                "a header has more than {MAX_HEADER_BYTES} bytes"
            )));
        }
        let most = to.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let count = self.inner.read(to.get_mut(..most).unwrap_or_default())?;
        self.left.set(left - count as u64);
        Ok(count)
    }
}

/// Maximum size of an entry's header, with its long name, its attributes and the padding of the entry before.
const MAX_HEADER_BYTES: u64 = 128 << 10;
