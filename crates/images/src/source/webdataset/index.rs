//! What an archive holds and where, by its headers alone.

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tar::Archive;

use crate::{ImageError, Result};

/// A stretch of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Which members count.
#[derive(Clone, Copy)]
pub(super) struct Rules<'a> {
    pub(super) images: &'a [String],
    pub(super) label: &'a str,
}

/// The samples of one archive.
#[derive(Debug, Default)]
pub(super) struct ShardIndex {
    /// The size of the archive.
    pub(super) bytes: u64,
    /// In the order of their first members.
    pub(super) samples: Vec<Sample>,
    /// How many others have no image.
    pub(super) incomplete: usize,
}

#[derive(Debug)]
pub(super) struct Sample {
    /// The name of the image.
    pub(super) name: Vec<u8>,
    pub(super) image: Span,
    pub(super) label: Option<Span>,
}

/// Reads the headers of all archives, several at a time: most of it is waiting for the disk.
pub(super) fn all(paths: &[PathBuf], rules: &Rules<'_>) -> Result<Vec<ShardIndex>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = Vec::new();
        while let number = next.fetch_add(1, Ordering::Relaxed)
            && let Some(path) = paths.get(number)
        {
            found.push((number, shard(path, rules)));
        }
        found
    };
    let mut indices = thread::scope(|scope| {
        let others: Vec<_> = (1..paths.len().min(THREADS)).map(|_| scope.spawn(work)).collect();
        let mut found = work();
        for other in others {
            match other.join() {
                Ok(more) => found.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        found
    });
    // Of several errors the first archive's, however the threads ran.
    indices.sort_unstable_by_key(|(number, _)| *number);
    indices.into_iter().map(|(_, index)| index).collect()
}

/// Reads the headers of one archive.
fn shard(path: &Path, rules: &Rules<'_>) -> Result<ShardIndex> {
    let failed = |cause| ImageError::Read { path: path.into(), cause };
    let damaged = |detail: String| ImageError::Format { path: path.into(), detail };
    let mut file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if let Some(format) = compression(&mut file).map_err(failed)? {
        return Err(damaged(format!(
            "it is compressed by {format}, so that its members cannot be read in any order; unpack \
             it to a .tar"
        )));
    }
    let reader = Bounded { file: &file, since_seek: Cell::new(0) };
    let mut archive = Archive::new(reader);
    let mut groups = Groups::default();
    let mut end = 0;
    for entry in archive.entries_with_seek().map_err(failed)? {
        let entry = entry.map_err(|error| match error.raw_os_error() {
            Some(_) => failed(error),
            None => damaged(format!("after byte {end}: {error}")),
        })?;
        let name = entry.path_bytes();
        let span = Span { offset: entry.raw_file_position(), bytes: entry.size() };
        let kind = entry.header().entry_type();
        if kind.is_gnu_sparse() {
            let name = String::from_utf8_lossy(&name);
            return Err(damaged(format!("the member {name} has holes; pack it without --sparse")));
        }
        end = span.offset.saturating_add(span.bytes);
        if end > bytes {
            return Err(damaged(format!(
                "the member {} has {} bytes from byte {}, and the file ends at {bytes}",
                String::from_utf8_lossy(&name),
                span.bytes,
                span.offset
            )));
        }
        if kind.is_file() {
            groups.add(&name, span, rules).map_err(damaged)?;
        }
    }
    Ok(groups.finish(bytes))
}

/// The samples as their members are met.
#[derive(Default)]
struct Groups {
    numbers: HashMap<Vec<u8>, usize>,
    groups: Vec<Group>,
}

#[derive(Default)]
struct Group {
    /// The image, with its place among the extensions that are images.
    image: Option<(usize, Vec<u8>, Span)>,
    label: Option<Span>,
}

impl Groups {
    /// Takes a member; the error says what is wrong with it.
    fn add(&mut self, name: &[u8], span: Span, rules: &Rules<'_>) -> Result<(), String> {
        let Some((key, extension)) = key_and_extension(name) else { return Ok(()) };
        let number = match self.numbers.entry(key.to_vec()) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                self.groups.push(Group::default());
                *entry.insert(self.groups.len() - 1)
            }
        };
        let Some(group) = self.groups.get_mut(number) else { return Ok(()) };
        let is = |known: &str| extension.eq_ignore_ascii_case(known.as_bytes());
        let twice = || Err(format!("the member {} is there twice", String::from_utf8_lossy(name)));
        if let Some(rank) = rules.images.iter().position(|known| is(known)) {
            match &group.image {
                Some((known, ..)) if *known == rank => return twice(),
                Some((known, ..)) if *known < rank => {}
                _ => group.image = Some((rank, name.to_vec(), span)),
            }
        } else if is(rules.label) && group.label.replace(span).is_some() {
            return twice();
        }
        Ok(())
    }

    fn finish(self, bytes: u64) -> ShardIndex {
        let mut index = ShardIndex { bytes, ..ShardIndex::default() };
        for Group { image, label } in self.groups {
            match image {
                Some((_, name, image)) => index.samples.push(Sample { name, image, label }),
                None => index.incomplete += 1,
            }
        }
        index
    }
}

/// Splits a name at the first dot of its last part; `None` when there is none, or nothing before.
fn key_and_extension(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let base = name.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let dot = base + name.get(base..)?.iter().position(|byte| *byte == b'.')?;
    if dot == base {
        return None;
    }
    Some((name.get(..dot)?, name.get(dot + 1..)?))
}

/// The program that packed a file, if one did.
fn compression(file: &mut File) -> io::Result<Option<&'static str>> {
    let mut magic = Vec::new();
    Read::by_ref(file).take(4).read_to_end(&mut magic)?;
    file.rewind()?;
    Ok(match magic.as_slice() {
        [0x1f, 0x8b, ..] => Some("gzip"),
        [0x28, 0xb5, 0x2f, 0xfd] => Some("zstd"),
        [0xfd, b'7', b'z', b'X'] => Some("xz"),
        [b'B', b'Z', b'h', _] => Some("bzip2"),
        _ => None,
    })
}

/// A file of which at most [`MAX_HEADER_BYTES`] are read in one go. The archive's reader takes a long
/// name, or a list of attributes, into memory whole, and seeks before each header.
struct Bounded<'a> {
    file: &'a File,
    since_seek: Cell<u64>,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.since_seek.get() > MAX_HEADER_BYTES {
            let message =
                format!("a name or its attributes have more than {MAX_HEADER_BYTES} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let bytes = self.file.read(buffer)?;
        self.since_seek.set(self.since_seek.get() + bytes as u64);
        Ok(bytes)
    }
}

impl Seek for Bounded<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.since_seek.set(0);
        self.file.seek(to)
    }
}

const MAX_HEADER_BYTES: u64 = 1 << 20;
const THREADS: usize = 8;
