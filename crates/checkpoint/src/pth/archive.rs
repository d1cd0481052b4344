//! The zip files of PyTorch, whose entries are stored without compression except for TorchScript's code.
//!
//! Zip libraries open whatever can be opened: they search the file for a directory, trust its number of entries, and
//! inflate. A file from a stranger is read strictly here instead: one directory at the very end, entries that do not
//! overlap, no compression except where the caller sets a limit ([`Archive::unpack`]). So the readable contents are
//! bounded by the size of the file, and every entry has a verified checksum.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

use flate2::read::DeflateDecoder;

use crate::fault::Fault;

/// An open archive.
#[derive(Debug)]
pub(super) struct Archive {
    file: File,
    /// Offset of the archive in the file, which may be an archive around it.
    base: u64,
    length: u64,
    entries: HashMap<String, Entry>,
    first: String,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Offset of the local header.
    header: u64,
    bytes: u64,
    /// Size of the contents, larger than `bytes` if compressed.
    content_bytes: u64,
    crc32: u32,
    storing: Storing,
    /// Offset of the next entry, or of the directory.
    end: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Storing {
    Plain,
    /// Compressed as in gzip (deflate).
    Deflated,
    /// Encrypted, or compressed by another method.
    Other,
}

impl Archive {
    /// Opens an archive that fills a file, and reads its directory.
    pub(super) fn open(file: File, length: u64) -> Result<Self, Fault> {
        Self::open_at(file, 0, length)
    }

    /// Opens the archive in an entry of this one.
    pub(super) fn open_inner(&self, name: &str) -> Result<Self, Fault> {
        let (entry, begin) = self.content(name)?;
        Self::open_at(self.file.try_clone()?, self.base + begin, entry.bytes)
    }

    /// Opens the archive of `length` bytes at `base` in a file.
    pub(super) fn open_at(file: File, base: u64, length: u64) -> Result<Self, Fault> {
        let (offset, bytes, count) = find_directory(&file, base, length)?;
        let mut directory = vec![0; bytes as usize];
        read_at(&file, base + offset, &mut directory)?;

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
        Ok(Self { file, base, length, entries, first })
    }

    /// Returns the folder around all entries of an archive of PyTorch: that of its first entry.
    pub(super) fn folder(&self) -> &str {
        self.first.split_once('/').map_or("", |(folder, _)| folder)
    }

    /// Returns the size of the archive in bytes.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Iterates over the names of all entries, in no particular order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Returns the stored size of an entry in bytes.
    pub(super) fn bytes(&self, name: &str) -> Result<u64, Fault> {
        self.entry(name).map(|entry| entry.bytes)
    }

    /// Reads the contents of an uncompressed entry and verifies its checksum.
    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>, Fault> {
        let (entry, begin) = self.content(name)?;
        let mut content = vec![0; entry.bytes as usize];
        read_at(&self.file, self.base + begin, &mut content)?;
        compare(name, crc32fast::hash(&content), entry.crc32)?;
        Ok(content)
    }

    /// Reads the contents of an entry that may be compressed, and verifies its checksum. Fails for more than `most`
    /// bytes.
    pub(super) fn unpack(&self, name: &str, most: u64) -> Result<Vec<u8>, Fault> {
        let entry = self.entry(name)?;
        if entry.content_bytes > most {
            return Err(Fault::unsupported(format_args!(
                "the entry {name} has {} bytes, at most {most} are read",
                entry.content_bytes
            )));
        }
        if entry.storing != Storing::Deflated {
            return self.read(name);
        }
        let begin = self.begin(name, entry)?;
        let mut packed = vec![0; entry.bytes as usize];
        read_at(&self.file, self.base + begin, &mut packed)?;
        let mut content = Vec::new();
        let mut unpacked =
            DeflateDecoder::new(packed.as_slice()).take(entry.content_bytes.saturating_add(1));
        unpacked.read_to_end(&mut content).map_err(|error| {
            Fault::damaged(format_args!("the entry {name} cannot be unpacked: {error}"))
        })?;
        if content.len() as u64 != entry.content_bytes {
            return Err(Fault::damaged(format_args!(
                "the entry {name} does not have the {} bytes that the directory declares",
                entry.content_bytes
            )));
        }
        compare(name, crc32fast::hash(&content), entry.crc32)?;
        Ok(content)
    }

    /// Copies `bytes` of an entry from `first` on to `out`, in pieces. With `verify`, first verifies the checksum of
    /// the whole entry, which reads it once more.
    pub(super) fn copy(
        &self,
        name: &str,
        verify: bool,
        first: u64,
        bytes: u64,
        out: &mut dyn Write,
    ) -> Result<(), Fault> {
        let place = self.place(name)?;
        if first.checked_add(bytes).is_none_or(|end| end > place.bytes) {
            return Err(Fault::damaged(format_args!("the entry {name} is too short")));
        }
        if verify {
            place.verify(&self.file)?;
        }
        read_pieces(&self.file, place.begin + first, bytes, &mut |piece| out.write_all(piece))
    }

    /// Returns the location of an entry's contents in the file.
    pub(super) fn place(&self, name: &str) -> Result<StoragePlace, Fault> {
        let (entry, begin) = self.content(name)?;
        let checksum = Some((name.to_owned(), entry.crc32));
        Ok(StoragePlace { begin: self.base + begin, bytes: entry.bytes, checksum })
    }

    pub(super) fn into_file(self) -> File {
        self.file
    }

    /// Returns an uncompressed entry, with the offset of its contents.
    fn content(&self, name: &str) -> Result<(Entry, u64), Fault> {
        let entry = self.entry(name)?;
        if entry.storing != Storing::Plain {
            return Err(Fault::unsupported(format_args!(
                "the entry {name} is compressed or encrypted, which torch.save never does; save \
                 it again with torch.save"
            )));
        }
        Ok((entry, self.begin(name, entry)?))
    }

    /// Returns the offset of an entry's bytes in the archive.
    fn begin(&self, name: &str, entry: Entry) -> Result<u64, Fault> {
        let mut header = [0; LOCAL as usize];
        read_at(&self.file, self.base + entry.header, &mut header)?;
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
        read_at(&self.file, self.base + entry.header + LOCAL, &mut own_name)?;
        if own_name != name.as_bytes() {
            return Err(Fault::damaged(format_args!("the entry {name} has another name inside")));
        }
        Ok(begin)
    }

    fn entry(&self, name: &str) -> Result<Entry, Fault> {
        let missing = || Fault::damaged(format_args!("the entry {name} is missing"));
        self.entries.get(name).copied().ok_or_else(missing)
    }
}

/// Location of a storage in its file.
#[derive(Debug, Clone)]
pub(crate) struct StoragePlace {
    pub(crate) begin: u64,
    pub(crate) bytes: u64,
    /// Name of the entry in a zip archive, and its checksum. `None` in formats without checksums.
    pub(crate) checksum: Option<(String, u32)>,
}

impl StoragePlace {
    /// Reads the storage in pieces and compares its checksum, if it has one.
    pub(crate) fn verify(&self, file: &File) -> Result<(), Fault> {
        let Some((name, expected)) = &self.checksum else { return Ok(()) };
        let mut crc = crc32fast::Hasher::new();
        read_pieces(file, self.begin, self.bytes, &mut |piece| {
            crc.update(piece);
            Ok(())
        })?;
        compare(name, crc.finalize(), *expected)
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

/// Returns offset, size and number of entries of the directory.
fn find_directory(file: &File, base: u64, length: u64) -> Result<(u64, u64, u64), Fault> {
    let no_end = || {
        Fault::damaged(
            "the archive's directory is not at its end: it was cut short, as by a download that ended early; \
             download or copy it again",
        )
    };
    let end = length.checked_sub(END).ok_or_else(no_end)?;
    let mut record = [0; END as usize];
    read_at(file, base + end, &mut record)?;
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
        read_at(file, base + locator_at, &mut locator)?;
        let mut fields = Fields(&locator);
        if fields.take::<4>()? == *LOCATOR_MAGIC {
            fields.skip(4)?;
            let end64 = fields.u64()?;
            if end64.checked_add(END64).is_none_or(|after| after > locator_at) {
                return Err(no_end());
            }
            let mut record = [0; END64 as usize];
            read_at(file, base + end64, &mut record)?;
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

    // A field of all ones is in the extra block of zip64 instead, in this order.
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
    let storing = match method {
        _ if flags & ENCRYPTED != 0 => Storing::Other,
        0 if packed == bytes => Storing::Plain,
        DEFLATED => Storing::Deflated,
        _ => Storing::Other,
    };
    Ok((name, Entry { header, bytes: packed, content_bytes: bytes, crc32, storing, end: 0 }))
}

pub(super) fn read_at(file: &File, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
    Ok(file.read_exact_at(into, offset)?)
}

/// Reads `bytes` bytes from `at` on, and passes them to `each` in pieces.
pub(super) fn read_pieces(
    file: &File,
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

/// A reader of consecutive little-endian fields.
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

// Records of APPNOTE.TXT 4.3 (pkware.com): magic numbers, and sizes without the variable parts.
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
const DEFLATED: u16 = 8;
/// Maximum size of a directory, enough for half a million tensors.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;
const PIECE_BYTES: usize = 1 << 20;
