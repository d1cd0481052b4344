//! Format of the files of corpora.
//!
//! Layout, little-endian: a header with a checksum of itself, from byte 4,096 on the token indices of all texts, then
//! four tables: the end of each text, the number of occurrences of each token, the end of each token, and the tokens,
//! one after the other. The header has a checksum of the indices and one of the tables.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::corpus::{Key, Parts, Store, Width};
use crate::files::io_error;
use crate::{Error, Result, TokenCorpus, TokenList};

/// Header of a corpus file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) key: [u8; 32],
    pub(super) width: Width,
    pub(super) texts: u64,
    pub(super) numbers: u64,
    pub(super) tokens: u64,
    pub(super) token_bytes: u64,
    pub(super) numbers_crc: u32,
    pub(super) tables_crc: u32,
}

pub(super) const MAGIC: &[u8; 8] = b"BRIGTOKS";
const VERSION: u32 = 1;
const HEADER: usize = 96;
/// Offset of the numbers, which begin on a page of their own.
pub(super) const NUMBERS: u64 = 4096;

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut rest = &mut bytes[..];
        let mut put = |field: &[u8]| {
            if let Some((place, after)) =
                std::mem::take(&mut rest).split_at_mut_checked(field.len())
            {
                place.copy_from_slice(field);
                rest = after;
            }
        };
        put(MAGIC);
        put(&VERSION.to_le_bytes());
        put(&(self.width.bytes() as u32).to_le_bytes());
        put(&self.key);
        for number in [self.texts, self.numbers, self.tokens, self.token_bytes] {
            put(&number.to_le_bytes());
        }
        put(&self.numbers_crc.to_le_bytes());
        put(&self.tables_crc.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..CHECKED]);
        bytes[CHECKED..CHECKED + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Parses a header. The error describes what is wrong.
    fn from_bytes(bytes: &[u8; HEADER]) -> Result<Self, String> {
        if &bytes[..8] != MAGIC {
            return Err("it does not begin as a corpus does".into());
        }
        let int = |start: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[start..start + 4]);
            u32::from_le_bytes(word)
        };
        let long = |start: usize| u64::from(int(start)) | u64::from(int(start + 4)) << 32;
        if int(CHECKED) != crc32fast::hash(&bytes[..CHECKED]) {
            return Err("its header is not as it was written".into());
        }
        if int(8) != VERSION {
            return Err(format!(
                "it is of version {}, this program reads version {VERSION}",
                int(8)
            ));
        }
        let width = match int(12) {
            2 => Width::Two,
            4 => Width::Four,
            bytes => return Err(format!("its numbers have {bytes} bytes")),
        };
        let mut key = [0; 32];
        key.copy_from_slice(&bytes[16..48]);
        Ok(Self {
            key,
            width,
            texts: long(48),
            numbers: long(56),
            tokens: long(64),
            token_bytes: long(72),
            numbers_crc: int(80),
            tables_crc: int(84),
        })
    }

    /// Returns the offset of the tables and the end of the file.
    fn places(self) -> Option<(u64, u64)> {
        let tables = self.numbers.checked_mul(self.width.bytes() as u64)?.checked_add(NUMBERS)?;
        let end = tables
            .checked_add(self.texts.checked_mul(8)?)?
            .checked_add(self.tokens.checked_mul(16)?)?
            .checked_add(self.token_bytes)?;
        Some((tables, end))
    }
}

const CHECKED: usize = 88;

/// Opens a file, and verifies the checksums of all of it.
pub(super) fn open(path: &Path) -> Result<TokenCorpus> {
    let failed = io_error(path);
    let damaged = |detail: String| Error::Format { path: path.into(), detail };
    let file = File::open(path).map_err(&failed)?;
    let length = file.metadata().map_err(&failed)?.len();
    let mut header = [0; HEADER];
    if length < HEADER as u64 {
        return Err(damaged(format!("it has {length} bytes, fewer than a header")));
    }
    file.read_exact_at(&mut header, 0).map_err(&failed)?;
    let header = Header::from_bytes(&header).map_err(&damaged)?;
    // Nothing is allocated that the file does not contain.
    let (tables, end) = header.places().filter(|(_, end)| *end == length).ok_or_else(|| {
        damaged(format!("it has {length} bytes, but its header declares another number"))
    })?;
    if checksum(&file, NUMBERS, tables).map_err(&failed)? != header.numbers_crc {
        return Err(damaged("the numbers of its texts are not as they were written".into()));
    }
    let mut bytes = vec![0; usize::try_from(end - tables).unwrap_or(0)];
    file.read_exact_at(&mut bytes, tables).map_err(&failed)?;
    if crc32fast::hash(&bytes) != header.tables_crc {
        return Err(damaged("its tables are not as they were written".into()));
    }
    let parts =
        parts(&header, &bytes).ok_or_else(|| damaged("its tables do not fit each other".into()));
    let (tokens, times, ends) = parts?;
    let store = Store::File { file, path: path.into(), start: NUMBERS, width: header.width };
    Ok(TokenCorpus::new(Parts { key: Key(header.key), tokens, times, ends, store }))
}

/// Parses the tables: tokens, occurrences of each token, and ends of the texts.
fn parts(header: &Header, bytes: &[u8]) -> Option<(TokenList, Vec<u64>, Vec<u64>)> {
    let mut rest = bytes;
    let mut table = |rows: u64| -> Option<Vec<u64>> {
        let (table, after) = rest.split_at_checked(usize::try_from(rows).ok()?.checked_mul(8)?)?;
        rest = after;
        Some(table.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number)).collect())
    };
    let ends = table(header.texts)?;
    let times = table(header.tokens)?;
    let token_ends = table(header.tokens)?;
    let token_ends = token_ends.into_iter().map(|end| usize::try_from(end).ok());
    let text = std::str::from_utf8(rest).ok()?;
    let tokens = TokenList::from_parts(text.to_owned(), token_ends.collect::<Option<_>>()?)?;
    let fits = ends.is_sorted() && ends.last().copied().unwrap_or(0) == header.numbers;
    fits.then_some((tokens, times, ends))
}

/// Computes the checksum of a part of a file.
fn checksum(file: &File, start: u64, end: u64) -> std::io::Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; BUFFER.min(usize::try_from(end - start).unwrap_or(BUFFER))];
    let mut offset = start;
    while offset < end {
        let left = usize::try_from(end - offset).unwrap_or(BUFFER).min(BUFFER);
        let piece = &mut buffer[..left];
        file.read_exact_at(piece, offset)?;
        hasher.update(piece);
        offset += left as u64;
    }
    Ok(hasher.finalize())
}

const BUFFER: usize = 1 << 20;
