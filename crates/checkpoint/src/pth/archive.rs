//! The zip files of `torch.save`: entries stored without compression.
//!
//! Zip libraries are built to open whatever can be opened: they search the file for a directory,
//! take its word for the number of entries, and inflate. A file from a stranger gets the narrow
//! reading here instead: one directory at the very end, entries that do not overlap, no
//! compression. So all that can be read is no more than the file holds, and a checksum is
//! verified over each entry.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

use crate::fault::Fault;

/// An open archive.
#[derive(Debug)]
pub(super) struct Archive {
    file: File,
    length: u64,
    entries: HashMap<String, Entry>,
    first: String,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Where its local header begins.
    header: u64,
    bytes: u64,
    crc32: u32,
    /// Neither compressed nor encrypted.
    plain: bool,
    /// Where the next entry or the directory begins.
    end: u64,
}

impl Archive {
    /// Reads the directory.
    pub(super) fn open(mut file: File, length: u64) -> Result<Self, Fault> {
        let (offset, bytes, count) = find_directory(&mut file, length)?;
        let mut directory = vec![0; bytes as usize];
        read_at(&mut file, offset, &mut directory)?;

        let mut listed = Vec::new();
        let mut fields = Fields(&directory);
        for _ in 0..count {
            listed.push(read_entry(&mut fields)?);
        }
        listed.sort_by_key(|(_, entry)| entry.header);
        let Some((first, _)) = listed.first() else {
            return Err(Fault::damaged("the archive is empty"));
        };
        let first = first.clone();
        let mut end = offset;
        for (name, entry) in listed.iter_mut().rev() {
            entry.end = end;
            let least = entry.header.checked_add(entry.bytes).and_then(|e| e.checked_add(LOCAL));
            if least.is_none_or(|least| least > end) {
                return Err(Fault::damaged(format_args!(
                    "the entry {name} of {} bytes at {} reaches beyond {end}, where the next begins",
                    entry.bytes, entry.header
                )));
            }
            end = entry.header;
        }
        let listed_count = listed.len();
        let entries: HashMap<_, _> = listed.into_iter().collect();
        if entries.len() != listed_count {
            return Err(Fault::damaged("the archive has two entries of one name"));
        }
        Ok(Self { file, length, entries, first })
    }

    /// The folder that all of an archive of PyTorch lies in: that of its first entry.
    pub(super) fn folder(&self) -> &str {
        self.first.split_once('/').map_or("", |(folder, _)| folder)
    }

    /// The size of the whole file.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The size of an entry.
    pub(super) fn bytes(&self, name: &str) -> Result<u64, Fault> {
        self.entry(name).map(|entry| entry.bytes)
    }

    /// Reads the content of an entry and verifies its checksum.
    pub(super) fn read(&mut self, name: &str) -> Result<Vec<u8>, Fault> {
        let (entry, begin) = self.content(name)?;
        let mut content = vec![0; entry.bytes as usize];
        read_at(&mut self.file, begin, &mut content)?;
        compare(name, crc32fast::hash(&content), entry.crc32)?;
        Ok(content)
    }

    /// Copies `bytes` of an entry from `first` on to `out`, in pieces. With `verify` the checksum of the whole
    /// entry is verified before, which reads it once more.
    pub(super) fn copy(
        &mut self,
        name: &str,
        verify: bool,
        first: u64,
        bytes: u64,
        out: &mut dyn Write,
    ) -> Result<(), Fault> {
        let (entry, begin) = self.content(name)?;
        if first.checked_add(bytes).is_none_or(|end| end > entry.bytes) {
            return Err(Fault::damaged(format_args!("the entry {name} is too short")));
        }
        if verify {
            let mut crc = crc32fast::Hasher::new();
            read_pieces(&mut self.file, begin, entry.bytes, &mut |piece| {
                crc.update(piece);
                Ok(())
            })?;
            compare(name, crc.finalize(), entry.crc32)?;
        }
        read_pieces(&mut self.file, begin + first, bytes, &mut |piece| out.write_all(piece))
    }

    /// An entry, and where its content begins.
    fn content(&mut self, name: &str) -> Result<(Entry, u64), Fault> {
        let entry = self.entry(name)?;
        if !entry.plain {
            return Err(Fault::unsupported(format_args!(
                "the entry {name} is compressed or encrypted, which torch.save never does; save \
                 it again with torch.save"
            )));
        }
        let mut header = [0; LOCAL as usize];
        read_at(&mut self.file, entry.header, &mut header)?;
        let mut fields = Fields(&header);
        if fields.take::<4>()? != *LOCAL_MAGIC {
            return Err(Fault::damaged(format_args!("the entry {name} is not at its place")));
        }
        fields.skip(22)?;
        let (name_bytes, extra_bytes) = (fields.u16()?, fields.u16()?);
        let begin = entry.header + LOCAL + u64::from(name_bytes) + u64::from(extra_bytes);
        if begin.checked_add(entry.bytes).is_none_or(|end| end > entry.end) {
            return Err(Fault::damaged(format_args!("the entry {name} runs into the next")));
        }
        let mut own_name = vec![0; name_bytes.into()];
        read_at(&mut self.file, entry.header + LOCAL, &mut own_name)?;
        if own_name != name.as_bytes() {
            return Err(Fault::damaged(format_args!("the entry {name} has another name inside")));
        }
        Ok((entry, begin))
    }

    fn entry(&self, name: &str) -> Result<Entry, Fault> {
        let missing = || Fault::damaged(format_args!("the entry {name} is missing"));
        self.entries.get(name).copied().ok_or_else(missing)
    }
}

fn compare(name: &str, found: u32, expected: u32) -> Result<(), Fault> {
    if found == expected {
        return Ok(());
    }
    Err(Fault::damaged(format_args!(
        "the checksum of the entry {name} is {found:08x}, not {expected:08x}"
    )))
}

/// Offset, size and number of entries of the directory.
fn find_directory(file: &mut File, length: u64) -> Result<(u64, u64, u64), Fault> {
    let no_end = || Fault::damaged("the archive's directory is not at its end: it is truncated");
    let end = length.checked_sub(END).ok_or_else(no_end)?;
    let mut record = [0; END as usize];
    read_at(file, end, &mut record)?;
    let mut fields = Fields(&record);
    if fields.take::<4>()? != *END_MAGIC {
        return Err(no_end());
    }
    fields.skip(6)?;
    let mut count = u64::from(fields.u16()?);
    let mut bytes = u64::from(fields.u32()?);
    let mut offset = u64::from(fields.u32()?);
    let mut limit = end;

    let locator_at = end.checked_sub(LOCATOR);
    if let Some(locator_at) = locator_at {
        let mut locator = [0; LOCATOR as usize];
        read_at(file, locator_at, &mut locator)?;
        let mut fields = Fields(&locator);
        if fields.take::<4>()? == *LOCATOR_MAGIC {
            fields.skip(4)?;
            let end64 = fields.u64()?;
            if end64.checked_add(END64).is_none_or(|after| after > locator_at) {
                return Err(no_end());
            }
            let mut record = [0; END64 as usize];
            read_at(file, end64, &mut record)?;
            let mut fields = Fields(&record);
            if fields.take::<4>()? != *END64_MAGIC {
                return Err(no_end());
            }
            fields.skip(28)?;
            (count, bytes, offset) = (fields.u64()?, fields.u64()?, fields.u64()?);
            limit = end64;
        }
    }
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= limit);
    if !inside || bytes > MAX_DIRECTORY_BYTES || count > bytes / DIRECTORY_ENTRY {
        return Err(Fault::damaged(format_args!(
            "the archive declares {count} entries in a directory of {bytes} bytes at {offset}, \
             the file has {length}"
        )));
    }
    Ok((offset, bytes, count))
}

fn read_entry(fields: &mut Fields<'_>) -> Result<(String, Entry), Fault> {
    if fields.take::<4>()? != *DIRECTORY_MAGIC {
        return Err(Fault::damaged("the archive's directory is damaged"));
    }
    fields.skip(4)?;
    let (flags, method) = (fields.u16()?, fields.u16()?);
    fields.skip(4)?;
    let crc32 = fields.u32()?;
    let (packed, bytes) = (fields.u32()?, fields.u32()?);
    let [name, extra, comment] = [fields.u16()?, fields.u16()?, fields.u16()?];
    fields.skip(8)?;
    let header = fields.u32()?;
    let name = String::from_utf8_lossy(fields.slice(name.into())?).into_owned();
    let mut extra = Fields(fields.slice(extra.into())?);
    fields.skip(comment.into())?;

    // A field of all ones stands in the extra block of zip64, in this order.
    let mut wide = Fields(&[]);
    while extra.0.len() >= 4 {
        let (id, bytes) = (extra.u16()?, extra.u16()?);
        let block = extra.slice(bytes.into())?;
        if id == ZIP64_EXTRA {
            wide = Fields(block);
        }
    }
    let mut widen = |narrow: u32| {
        if narrow == u32::MAX { wide.u64() } else { Ok(u64::from(narrow)) }
    };
    let (bytes, packed, header) = (widen(bytes)?, widen(packed)?, widen(header)?);
    let plain = method == 0 && packed == bytes && flags & ENCRYPTED == 0;
    Ok((name, Entry { header, bytes: packed, crc32, plain, end: 0 }))
}

pub(super) fn read_at(file: &mut File, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
    file.seek(SeekFrom::Start(offset))?;
    Ok(file.read_exact(into)?)
}

/// Reads `bytes` bytes from `at` on in pieces.
pub(super) fn read_pieces(
    file: &mut File,
    mut at: u64,
    bytes: u64,
    each: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<(), Fault> {
    let end = at + bytes;
    let mut piece = vec![0; PIECE_BYTES.min(bytes as usize)];
    while at < end {
        let now = (end - at).min(PIECE_BYTES as u64) as usize;
        read_at(file, at, &mut piece[..now])?;
        each(&piece[..now]).map_err(Fault::Write)?;
        at += now as u64;
    }
    Ok(())
}

/// Little-endian fields one after another.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn slice(&mut self, bytes: usize) -> Result<&'a [u8], Fault> {
        let parts = self.0.split_at_checked(bytes);
        let (taken, rest) = parts.ok_or(Fault::Ended)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut taken = [0; N];
        taken.copy_from_slice(self.slice(N)?);
        Ok(taken)
    }

    fn skip(&mut self, bytes: usize) -> Result<(), Fault> {
        self.slice(bytes).map(drop)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Fault> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Fault> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Fault> {
        self.take().map(u64::from_le_bytes)
    }
}

// Records of APPNOTE.TXT 4.3 (pkware.com): their marks, and their sizes without what varies.
const LOCAL_MAGIC: &[u8; 4] = b"PK\x03\x04";
const LOCAL: u64 = 30;
const DIRECTORY_MAGIC: &[u8; 4] = b"PK\x01\x02";
const DIRECTORY_ENTRY: u64 = 46;
const END_MAGIC: &[u8; 4] = b"PK\x05\x06";
const END: u64 = 22;
const LOCATOR_MAGIC: &[u8; 4] = b"PK\x06\x07";
const LOCATOR: u64 = 20;
const END64_MAGIC: &[u8; 4] = b"PK\x06\x06";
const END64: u64 = 56;
const ZIP64_EXTRA: u16 = 1;
const ENCRYPTED: u16 = 1;
/// Room for half a million tensors.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;
const PIECE_BYTES: usize = 1 << 20;
