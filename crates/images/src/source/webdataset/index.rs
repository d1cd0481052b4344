//! Index of an archive: names and positions of its members, from the headers alone.

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use flate2::read::MultiGzDecoder;
use tar::Archive;

use super::MAX_LABEL_BYTES;
use super::shards::{ShardFacts, Span, Unpacked, Unpacking};
use crate::image_source::{MAX_ENCODED_BYTES, version_of};
use crate::{ImageError, Result};

/// Rules by which members are recognized as images and labels.
#[derive(Clone, Copy)]
pub(super) struct Rules<'a> {
    pub(super) images: &'a [String],
    /// `true` if the caller has set these extensions, so that no others are images.
    pub(super) named: bool,
    pub(super) label: &'a str,
}

/// The samples of one archive.
#[derive(Debug, Default)]
pub(super) struct ShardIndex {
    pub(super) facts: ShardFacts,
    /// Samples in the order of their first members.
    pub(super) samples: Vec<Sample>,
    /// Number of samples without an image, which are left out.
    pub(super) incomplete: usize,
}

#[derive(Debug)]
pub(super) struct Sample {
    /// Name of the image's member.
    pub(super) name: Vec<u8>,
    pub(super) image: Span,
    pub(super) label: Option<Span>,
}

/// Reads the headers of all archives, several at a time, because most of the time is spent waiting for the disk.
pub(super) fn all(
    paths: &[PathBuf],
    rules: &Rules<'_>,
    unpacked: &Unpacked,
) -> Result<Vec<ShardIndex>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = Vec::new();
        while let number = next.fetch_add(1, Ordering::Relaxed)
            && let Some(path) = paths.get(number)
        {
            found.push((number, shard(path, rules, unpacked)));
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
    // Of several errors, the first archive's is returned, independent of the order of threads.
    indices.sort_unstable_by_key(|(number, _)| *number);
    indices.into_iter().map(|(_, index)| index).collect()
}

/// Reads the headers of one archive.
fn shard(path: &Path, rules: &Rules<'_>, unpacked: &Unpacked) -> Result<ShardIndex> {
    let failed = |cause| ImageError::Read { path: path.into(), cause };
    let damaged = |detail: String| ImageError::Format { path: path.into(), detail };
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let bytes = metadata.len();
    let facts = ShardFacts { bytes, version: version_of(&metadata), unpacked: false };
    match compression(&mut file).map_err(failed)? {
        Some("gzip") => return compressed(path, &file, facts, rules, unpacked),
        Some(format) => {
            return Err(damaged(format!(
                "it is compressed by {format}, so that its members cannot be read in any order; \
                 unpack it to a .tar"
            )));
        }
        None => {}
    }
    let since_seek = Cell::new(0);
    let reader = Bounded { file: &file, since_seek: &since_seek };
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
    groups.finish(facts, rules).map_err(damaged)
}

/// Reads a compressed archive from its beginning to its end, and writes its images and labels to the temporary file,
/// where they can be read in any order.
fn compressed(
    path: &Path,
    file: &File,
    facts: ShardFacts,
    rules: &Rules<'_>,
    unpacked: &Unpacked,
) -> Result<ShardIndex> {
    let damaged = |detail: String| ImageError::Format { path: path.into(), detail };
    let stream = BufReader::with_capacity(1 << 20, file);
    let since_member = Cell::new(0);
    let reader = Bounded { file: MultiGzDecoder::new(stream), since_seek: &since_member };
    let mut archive = Archive::new(reader);
    let mut groups = Groups::default();
    let most = facts.bytes.saturating_mul(EXPANSION).saturating_add(FREE_BYTES);
    let mut left = most;
    let unread = |error: io::Error| match error.raw_os_error() {
        Some(_) => ImageError::Read { path: path.into(), cause: error },
        None => damaged(format!("as gzip: {error}")),
    };
    for entry in archive.entries().map_err(unread)? {
        let mut entry = entry.map_err(unread)?;
        let name = entry.path_bytes().into_owned();
        let kind = entry.header().entry_type();
        if kind.is_gnu_sparse() {
            let name = String::from_utf8_lossy(&name);
            return Err(damaged(format!("the member {name} has holes; pack it without --sparse")));
        }
        since_member.set(UNCOUNTED);
        if kind.is_file()
            && let Some(wanted) = rules.wanted(&name)
        {
            let bytes = entry.size();
            let span = match wanted {
                Wanted::Image(_) if bytes > MAX_ENCODED_BYTES => {
                    return Err(damaged(format!(
                        "the member {} has {bytes} bytes, more than an image may have",
                        String::from_utf8_lossy(&name)
                    )));
                }
                // An error when the labels are read, which checks the length only.
                Wanted::Label if bytes > MAX_LABEL_BYTES => Span { offset: 0, bytes },
                _ if bytes > left => {
                    return Err(damaged(format!(
                        "its images and labels have more than {most} bytes up to the member {}, too many for \
                         its size; unpack it to a .tar if you trust it",
                        String::from_utf8_lossy(&name)
                    )));
                }
                _ => {
                    left -= bytes;
                    unpacked.add(bytes, &mut entry).map_err(|error| match error {
                        Unpacking::Read(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                            damaged(format!(
                                "the member {} has {bytes} bytes, and the archive ends before them",
                                String::from_utf8_lossy(&name)
                            ))
                        }
                        Unpacking::Read(error) => unread(error),
                        Unpacking::Write(error) => ImageError::InvalidArgument(format!(
                            "cannot unpack {} into the temporary folder: {error}; give another by \
                         TMPDIR, or unpack the archive to a .tar",
                            path.display()
                        )),
                    })?
                }
            };
            groups.add(&name, span, rules).map_err(damaged)?;
        }
        // The rest of an unwanted member is skipped before the next header.
        io::copy(&mut entry, &mut io::sink()).map_err(unread)?;
        since_member.set(0);
    }
    groups.finish(ShardFacts { unpacked: true, ..facts }, rules).map_err(damaged)
}

impl Rules<'_> {
    /// Returns the position of an extension in the list of image extensions. Longer extensions that end in one of these
    /// come after them, all with the same position.
    fn rank(&self, extension: &[u8]) -> Option<usize> {
        let find = |extension: &[u8]| {
            self.images.iter().position(|it| extension.eq_ignore_ascii_case(it.as_bytes()))
        };
        let last = || {
            let dot = extension.iter().rposition(|byte| *byte == b'.').filter(|_| !self.named)?;
            find(extension.get(dot + 1..)?).map(|_| self.images.len())
        };
        find(extension).or_else(last)
    }

    /// Returns the kind of a member by its extension, `None` if it is neither an image nor a label. The extension of a
    /// label may end like an image's.
    fn wanted_as(&self, extension: &[u8]) -> Option<Wanted> {
        let is_label = extension.eq_ignore_ascii_case(self.label.as_bytes());
        match self.rank(extension) {
            Some(rank) if rank < self.images.len() || !is_label => Some(Wanted::Image(rank)),
            _ => is_label.then_some(Wanted::Label),
        }
    }

    fn wanted(&self, name: &[u8]) -> Option<Wanted> {
        key_and_extension(name).and_then(|(_, extension)| self.wanted_as(extension))
    }
}

/// Kind of a member that is read.
enum Wanted {
    /// An image, with the position of its extension in the list of image extensions.
    Image(usize),
    Label,
}

/// The samples found so far, in the order of their first members.
#[derive(Default)]
struct Groups {
    numbers: HashMap<Vec<u8>, usize>,
    groups: Vec<Group>,
}

#[derive(Default)]
struct Group {
    /// The image, with the position of its extension in the list of image extensions.
    image: Option<(usize, Vec<u8>, Span)>,
    /// Another image with the last position, if none with an earlier position was found.
    other: Option<Vec<u8>>,
    label: Option<Span>,
}

impl Groups {
    /// Adds a member. The error describes a fault of the member.
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
        let twice = || Err(format!("duplicate member {}", String::from_utf8_lossy(name)));
        match rules.wanted_as(extension) {
            Some(Wanted::Image(rank)) => match &group.image {
                Some((known, same, _)) if *known == rank => {
                    if rank < rules.images.len() || same == name {
                        return twice();
                    }
                    group.other = Some(name.to_vec());
                }
                Some((known, ..)) if *known < rank => {}
                _ => group.image = Some((rank, name.to_vec(), span)),
            },
            Some(Wanted::Label) if group.label.replace(span).is_some() => return twice(),
            _ => {}
        }
        Ok(())
    }

    /// Returns the samples. Fails for a sample with two images of which none has precedence.
    fn finish(self, facts: ShardFacts, rules: &Rules<'_>) -> Result<ShardIndex, String> {
        let mut index = ShardIndex { facts, ..ShardIndex::default() };
        for Group { image, other, label } in self.groups {
            if let (Some((rank, name, _)), Some(other)) = (&image, other)
                && *rank == rules.images.len()
            {
                let extension = key_and_extension(name).map_or(&[][..], |(_, extension)| extension);
                let [name, other, extension] =
                    [name, &other, extension].map(String::from_utf8_lossy);
                return Err(format!(
                    "{name} and {other} are images of one sample; choose one: \
                     `images([{extension:?}])`, or --image-from {extension}"
                ));
            }
            match image {
                Some((_, name, image)) => index.samples.push(Sample { name, image, label }),
                None => index.incomplete += 1,
            }
        }
        Ok(index)
    }
}

/// Splits a name at the first dot of its last component. Returns `None` if there is no dot, or nothing before it.
fn key_and_extension(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let base = name.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let dot = base + name.get(base..)?.iter().position(|byte| *byte == b'.')?;
    if dot == base {
        return None;
    }
    Some((name.get(..dot)?, name.get(dot + 1..)?))
}

/// Returns the name of the program that compressed a file, if one did.
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

/// A file of which at most [`MAX_HEADER_BYTES`] are read without a seek. The reader of the archive reads a long name,
/// or a list of attributes, into memory as a whole, and seeks before each header. For a stream, which cannot seek, the
/// code that reads the members resets the count.
struct Bounded<'a, R> {
    file: R,
    since_seek: &'a Cell<u64>,
}

/// Value of the count while a member is read, whose length is not limited.
const UNCOUNTED: u64 = u64::MAX;

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.since_seek.get() == UNCOUNTED {
            return self.file.read(buffer);
        }
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

impl<R: Seek> Seek for Bounded<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.since_seek.set(0);
        self.file.seek(to)
    }
}

const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Factor by which an archive may grow in the temporary folder. Deflate can expand one byte to 1032; images that are
/// compressed already hardly grow.
const EXPANSION: u64 = 100;
/// Added to that limit, for small archives.
const FREE_BYTES: u64 = 1 << 28;
const THREADS: usize = 8;
