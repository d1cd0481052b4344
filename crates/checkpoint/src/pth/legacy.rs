//! Files of `torch.save` before PyTorch 1.6, and of later versions with `_use_new_zipfile_serialization=False`: pickles
//! of a magic number, the format's version, facts about the system, the object and the list of its storages, and then
//! the storages in the list's order, each after the number of its elements.
//!
//! The format has no checksums and no directory: the location of a storage follows from the sizes of those before it,
//! which depend on the types that the object's pickle declares.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};

use super::archive::{read_at, read_pieces};
use super::pickle::{Dialect, MAX_BYTES, Node, Pickle, Value};
use super::shown;
use crate::dtype::Dtype;
use crate::fault::Fault;

/// An open file in the old format.
#[derive(Debug)]
pub(super) struct Legacy {
    file: File,
    length: u64,
    /// Offset and size in bytes of each storage.
    storages: HashMap<String, (u64, u64)>,
}

impl Legacy {
    /// Opens a file and reads everything except the storages. Also returns the object's pickle.
    pub(super) fn open(file: File, length: u64) -> Result<(Self, Vec<u8>), Fault> {
        let mut stream = Stream { file, length, at: 0 };
        if !begins_legacy(&stream.pickle("magic number")?) {
            return Err(Fault::unsupported("it is a pickle, but not one of torch.save"));
        }
        let version = stream.pickle("version")?;
        match Pickle::read(&version, Dialect::Torch)?.root() {
            Value::Int(VERSION) => {}
            Value::Int(other) => {
                return Err(Fault::unsupported(format_args!(
                    "it is in version {other} of torch.save's format before PyTorch 1.6; only version \
                     {VERSION} is supported"
                )));
            }
            _ => return Err(Fault::damaged("the version of its format is not a number")),
        }
        let system = stream.pickle("system's facts")?;
        let swapped_counts = !little_endian(&Pickle::read(&system, Dialect::Torch)?);
        let code = stream.pickle("pickle")?;
        let keys = stream.pickle("list of storages")?;
        let keys = strings(&Pickle::read(&keys, Dialect::Torch)?)?;

        // The first of two types declared for a storage counts, as in Python.
        let mut declared = HashMap::new();
        let pickle = Pickle::read(&code, Dialect::Torch)?;
        for storage in pickle.storages() {
            declared
                .entry(storage.key)
                .or_insert_with(|| (storage.numel, storage.dtype.map_or(1, Dtype::bytes)));
        }
        let mut storages = HashMap::with_capacity(keys.len());
        for key in keys {
            let Some(&(elements, width)) = declared.get(key.as_str()) else {
                return Err(Fault::damaged(format_args!(
                    "no tensor declares the type of storage {}",
                    shown(&key)
                )));
            };
            let place = stream.storage(&key, elements, width, swapped_counts)?;
            if storages.insert(key.clone(), place).is_some() {
                return Err(Fault::damaged(format_args!("duplicate storage {}", shown(&key))));
            }
        }
        drop(pickle);
        Ok((Self { file: stream.file, length, storages }, code))
    }

    /// Returns the size of the whole file in bytes.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the size of a storage in bytes.
    pub(super) fn bytes(&self, key: &str) -> Result<u64, Fault> {
        self.place(key).map(|(_, bytes)| bytes)
    }

    /// Reads the bytes of a storage.
    pub(super) fn read(&self, key: &str) -> Result<Vec<u8>, Fault> {
        let (begin, bytes) = self.place(key)?;
        let mut content = vec![0; bytes as usize];
        read_at(&self.file, begin, &mut content)?;
        Ok(content)
    }

    /// Copies `bytes` of a storage from `first` on to `out`, in pieces.
    pub(super) fn copy(
        &self,
        key: &str,
        first: u64,
        bytes: u64,
        out: &mut dyn Write,
    ) -> Result<(), Fault> {
        let (begin, length) = self.place(key)?;
        if first.checked_add(bytes).is_none_or(|end| end > length) {
            return Err(Fault::damaged(format_args!("storage {} is too short", shown(key))));
        }
        let mut each = |piece: &[u8]| -> io::Result<()> { out.write_all(piece) };
        read_pieces(&self.file, begin + first, bytes, &mut each)
    }

    pub(super) fn into_file(self) -> File {
        self.file
    }

    /// Returns offset and size in bytes of a storage.
    pub(super) fn place(&self, key: &str) -> Result<(u64, u64), Fault> {
        let missing = || Fault::damaged(format_args!("storage {} is missing", shown(key)));
        self.storages.get(key).copied().ok_or_else(missing)
    }
}

/// A reader of consecutive pickles and storages.
struct Stream {
    file: File,
    length: u64,
    at: u64,
}

impl Stream {
    /// Returns the bytes of the next pickle, whose length is known only from its end.
    fn pickle(&mut self, what: &str) -> Result<Vec<u8>, Fault> {
        let rest = self.length - self.at;
        let mut bytes = FIRST_BYTES.min(rest);
        loop {
            let mut code = vec![0; bytes as usize];
            read_at(&self.file, self.at, &mut code)?;
            let length = Pickle::read(&code, Dialect::Torch).map(|pickle| pickle.length());
            match length {
                Ok(length) => {
                    code.truncate(length);
                    self.at += length as u64;
                    return Ok(code);
                }
                Err(Fault::Ended) if bytes == rest => {
                    return Err(Fault::damaged(format_args!("it ends within its {what}")));
                }
                Err(Fault::Ended) if bytes >= MAX_BYTES as u64 => {
                    return Err(Fault::unsupported(format_args!(
                        "its {what} does not end within the {MAX_BYTES} bytes that tensors can need"
                    )));
                }
                Err(Fault::Ended) => bytes = (4 * bytes).min(rest).min(MAX_BYTES as u64),
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Returns offset and size of the next storage.
    ///
    /// The elements are little-endian on every machine. Their number is little-endian only since PyTorch 1.6.
    fn storage(
        &mut self,
        key: &str,
        elements: i64,
        width: u64,
        swapped_counts: bool,
    ) -> Result<(u64, u64), Fault> {
        let cut = |at: u64, length: u64| {
            Fault::damaged(format_args!(
                "it is cut short: storage {} is to end at byte {at}, the file has {length}",
                shown(key)
            ))
        };
        let begin = self.at + COUNT_BYTES;
        if begin > self.length {
            return Err(cut(begin, self.length));
        }
        let mut count = [0; COUNT_BYTES as usize];
        read_at(&self.file, self.at, &mut count)?;
        let mut found = i64::from_le_bytes(count);
        if swapped_counts && found != elements {
            found = found.swap_bytes();
        }
        if found != elements {
            return Err(Fault::damaged(format_args!(
                "storage {} is declared as {elements} elements but has {found}",
                shown(key)
            )));
        }
        let bytes = u64::try_from(elements).ok().and_then(|elements| elements.checked_mul(width));
        let end = bytes.and_then(|bytes| begin.checked_add(bytes)).unwrap_or(u64::MAX);
        if end > self.length {
            return Err(cut(end, self.length));
        }
        self.at = end;
        Ok((begin, end - begin))
    }
}

/// Returns `true` unless the file was written on a big-endian machine. Files without the entry count as little-endian.
fn little_endian(system: &Pickle<'_>) -> bool {
    let Value::Node(index) = system.root() else { return true };
    let Some(Node::Dict(entries)) = system.node(index) else { return true };
    !entries.contains(&(Value::Str("little_endian"), Value::Bool(false)))
}

fn strings(pickle: &Pickle<'_>) -> Result<Vec<String>, Fault> {
    let wrong = || Fault::damaged("its list of storages is not a list of strings");
    let Value::Node(index) = pickle.root() else { return Err(wrong()) };
    let Some(Node::List(items) | Node::Tuple(items)) = pickle.node(index) else {
        return Err(wrong());
    };
    let mut strings = Vec::with_capacity(items.len());
    let mut bytes = 0;
    for item in items {
        let Value::Str(text) = item else { return Err(wrong()) };
        // Two bytes of the pickle can recall a long string, any number of times.
        bytes += text.len();
        if bytes > pickle.length() {
            return Err(Fault::damaged("its list of storages repeats names"));
        }
        strings.push((*text).to_owned());
    }
    Ok(strings)
}

const VERSION: i64 = 1001;
/// Initial number of bytes read for a pickle, enough for most models.
const FIRST_BYTES: u64 = 64 << 10;
const COUNT_BYTES: u64 = 8;

/// Returns `true` for a file in the format before zip archives. `start` needs at most 262 bytes.
pub(crate) fn begins_legacy(start: &[u8]) -> bool {
    let Some(([0x80, _protocol], rest)) = start.split_at_checked(2) else { return false };
    // Skips the frame length of protocols 4 and 5.
    let rest = if rest.first() == Some(&0x95) { rest.get(9..).unwrap_or_default() } else { rest };
    rest.starts_with(MAGIC)
}

/// Pickled magic number: LONG1 of 0x1950a86a20f9469cfc6c, and STOP.
const MAGIC: &[u8] = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
