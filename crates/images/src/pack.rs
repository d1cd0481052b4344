//! Decoded images in one file.
//!
//! Layout, little-endian: a header of 128 bytes, pixels, a table of 32 bytes for each image, and JSON with the names of
//! images and classes. The header contains the positions of table and JSON, their digest, and a checksum of itself; the
//! table contains a checksum of each image's pixels, so that the digest covers everything. The file is renamed to its
//! final name when it is complete.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, Write};
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use brigade_rank_env::text::counted;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::decode::DecodeOptions;
use crate::image::{Image, Size};
use crate::image_source::{Fingerprint, Hasher, ImageSource};
use crate::labels::{Categories, Labelled};
use crate::samples::{OnBroken, SampleReader, raw};
use crate::transforms::Compose;
use crate::{ImageError, Result};

const MAGIC: &[u8; 8] = b"BRIGPACK";
const VERSION: u32 = 1;
const HEADER: u64 = 128;
const ENTRY: usize = 32;

/// Writes images, decoded and transformed once, into one file that [`PackedImages`] reads.
///
/// Reading an image from such a file costs a copy from the page cache. The file takes three bytes per pixel of disk
/// space and, to be fast, of memory.
///
/// ```
/// use brigade_images::labels::{Categories, Labelled};
/// use brigade_images::transforms::{Compose, Resize};
/// use brigade_images::{PackedImages, Packer, Size};
/// # use std::borrow::Cow;
/// # use brigade_images::{Result, source::ImageSource};
/// # struct Black;
/// # impl ImageSource for Black {
/// #     fn len(&self) -> usize { 3 }
/// #     fn read(&self, _: usize, buffer: &mut Vec<u8>) -> Result<()> {
/// #         *buffer = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
/// #         buffer.resize(58, 0);
/// #         Ok(())
/// #     }
/// #     fn name(&self, index: usize) -> Cow<'_, str> { index.to_string().into() }
/// # }
/// # let folder = tempfile::tempdir()?;
/// # let photos = Labelled::new(Black, vec![0, 1, 0], Categories::sorted(["beagle", "dingo"]))?;
///
/// let path = folder.path().join("dogs.pack");
/// let packer = Packer::new().transforms(Compose::new().then(Resize::shorter(4)));
/// packer.write(&photos, &path)?;
///
/// let dogs = PackedImages::labelled(&path)?;
/// assert_eq!(dogs.categories().names(), ["beagle", "dingo"]);
/// assert_eq!(dogs.source().size(2), Some(Size::from(4)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Packer {
    transforms: Compose,
    decode: DecodeOptions,
    threads: usize,
    on_broken: OnBroken,
}

/// Result of [`Packer::write`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackReport {
    /// Number of images in the file.
    pub images: usize,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Indices of the images of the source that could not be read and are left out, with the reasons.
    pub broken: Vec<(usize, String)>,
}

impl Default for Packer {
    fn default() -> Self {
        Self::new()
    }
}

impl Packer {
    /// Creates a packer that writes images as they are decoded, with one thread per core.
    #[must_use]
    pub fn new() -> Self {
        Self {
            transforms: Compose::new(),
            decode: DecodeOptions::default(),
            threads: thread::available_parallelism().map_or(1, NonZero::get),
            on_broken: OnBroken::Fail,
        }
    }

    /// Sets the transforms of each image before it is written, which are applied as in validation. Defaults to none.
    #[must_use]
    pub fn transforms(mut self, transforms: Compose) -> Self {
        self.transforms = transforms;
        self
    }

    /// Sets the options of the decoder.
    #[must_use]
    pub fn decode(mut self, options: DecodeOptions) -> Self {
        self.decode = options;
        self
    }

    /// Sets the number of threads that decode. Defaults to the number of cores.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets how to handle images that cannot be read: [`OnBroken::Skip`] leaves them out. Defaults to
    /// [`OnBroken::Fail`].
    #[must_use]
    pub fn on_broken(mut self, policy: OnBroken) -> Self {
        self.on_broken = policy;
        self
    }

    /// Writes images with their labels and classes.
    ///
    /// The file is the same with any number of threads. An existing file at `path` is replaced when the new one is
    /// complete and synced to disk.
    ///
    /// # Errors
    /// Fails if an image cannot be read and the policy is not to skip it, or if the file cannot be written.
    pub fn write<S: ImageSource>(&self, images: &Labelled<S>, path: &Path) -> Result<PackReport> {
        self.write_with(images, path, |_| {})
    }

    /// Writes images with their labels and classes, and calls `progress` with the number of finished images after each
    /// chunk of them.
    ///
    /// # Errors
    /// Returns the same errors as `write`.
    pub fn write_with<S: ImageSource>(
        &self,
        images: &Labelled<S>,
        path: &Path,
        mut progress: impl FnMut(usize),
    ) -> Result<PackReport> {
        let part = path.with_extension("pack-part");
        let written = self.write_part(images, &part, path, &mut progress);
        if written.is_err() {
            let _ = fs::remove_file(&part);
        }
        written
    }

    /// Writes the file under a temporary name, and renames it at the end.
    fn write_part<S: ImageSource>(
        &self,
        images: &Labelled<S>,
        part: &Path,
        path: &Path,
        progress: &mut dyn FnMut(usize),
    ) -> Result<PackReport> {
        let (source, labels) = (images.source(), images.labels());
        let failed = |error: io::Error| {
            ImageError::InvalidArgument(format!("cannot write {}: {error}", part.display()))
        };
        let mut writer = Writer::create(part).map_err(failed)?;
        let mut broken = Vec::new();
        let mut readers: Vec<SampleReader> =
            (0..self.threads.max(1)).map(|_| SampleReader::new(&self.decode)).collect();
        // Each thread decodes every n-th image of a chunk; the images are written in their order.
        let indices: Vec<usize> = (0..source.len()).collect();
        for chunk in indices.chunks(8 * readers.len()) {
            let read = self.read(source, &mut readers, chunk);
            if read.len() < chunk.len() {
                let all = chunk.first().zip(chunk.last());
                return Err(ImageError::InvalidArgument(format!(
                    "a thread panicked while it decoded one of the images {all:?}"
                )));
            }
            for (index, image) in read {
                match image {
                    Ok(image) => {
                        let label = labels.get(index).copied().unwrap_or_default();
                        let name = source.name(index);
                        writer.push(&image, label, name.into_owned()).map_err(failed)?;
                    }
                    Err(error) if self.on_broken == OnBroken::Skip => {
                        broken.push((index, error.to_string()));
                    }
                    Err(error) => return Err(error),
                }
            }
            progress(chunk.last().map_or(0, |last| last + 1));
        }
        let count = writer.table.len() / ENTRY;
        let bytes = writer.finish(images.categories().names(), part, path).map_err(failed)?;
        Ok(PackReport { images: count, bytes, broken })
    }

    /// Reads some images with several threads, and returns them in their order, without those of a thread that
    /// panicked.
    fn read<S: ImageSource>(
        &self,
        source: &S,
        readers: &mut [SampleReader],
        indices: &[usize],
    ) -> Vec<(usize, Result<Image>)> {
        let step = readers.len();
        let mut images: Vec<(usize, Result<Image>)> = thread::scope(|scope| {
            let threads: Vec<_> = readers
                .iter_mut()
                .enumerate()
                .map(|(first, reader)| {
                    scope.spawn(move || {
                        let mine = indices.iter().skip(first).step_by(step);
                        mine.map(|index| (*index, self.image(source, reader, *index))).collect()
                    })
                })
                .collect();
            let done = threads.into_iter().map(|thread| thread.join());
            done.flat_map(|images: thread::Result<Vec<_>>| images.unwrap_or_default()).collect()
        });
        images.sort_by_key(|(index, _)| *index);
        images
    }

    fn image<S: ImageSource>(
        &self,
        source: &S,
        reader: &mut SampleReader,
        index: usize,
    ) -> Result<Image> {
        reader.read_whole(source, index, &self.transforms)?;
        reader.take_image()
    }
}

/// Writer of a pack.
struct Writer {
    file: BufWriter<File>,
    end: u64,
    table: Vec<u8>,
    names: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Words {
    classes: Vec<String>,
    names: Vec<String>,
}

/// Positions of the parts of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    images: u64,
    table: u64,
    words: u64,
    end: u64,
    digest: [u8; 32],
}

impl Writer {
    fn create(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        file.write_all(&[0; HEADER as usize])?;
        Ok(Self { file, end: HEADER, table: Vec::new(), names: Vec::new() })
    }

    fn push(&mut self, image: &Image, label: i64, name: String) -> io::Result<()> {
        let pixels = image.pixels();
        self.file.write_all(pixels)?;
        let entry = Entry {
            offset: self.end,
            size: image.size(),
            checksum: crc32fast::hash(pixels),
            label,
        };
        self.table.extend(entry.to_bytes());
        self.names.push(name);
        self.end += pixels.len() as u64;
        Ok(())
    }

    /// Writes everything after the pixels, then the header, and renames the file.
    fn finish(self, classes: &[String], part: &Path, path: &Path) -> io::Result<u64> {
        let words = Words { classes: classes.to_vec(), names: self.names };
        let words = serde_json::to_vec(&words)?;
        let mut digest = Sha256::new();
        digest.update(&self.table);
        digest.update(&words);
        let table_end = self.end + self.table.len() as u64;
        let parts = Parts {
            images: (self.table.len() / ENTRY) as u64,
            table: self.end,
            words: table_end,
            end: table_end + words.len() as u64,
            digest: digest.finalize().into(),
        };
        let mut file = self.file;
        file.write_all(&self.table)?;
        file.write_all(&words)?;
        file.seek(io::SeekFrom::Start(0))?;
        file.write_all(&parts.to_bytes())?;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        fs::rename(part, path)?;
        Ok(parts.end)
    }
}

impl Parts {
    fn to_bytes(self) -> [u8; HEADER as usize] {
        let mut bytes = [0; HEADER as usize];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let numbers = [self.images, self.table, self.words, self.end];
        for (bytes, number) in bytes[16..48].chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        bytes[48..80].copy_from_slice(&self.digest);
        let checksum = crc32fast::hash(&bytes[..80]);
        bytes[80..84].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Parses a header, and rejects one that does not fit a file of `len` bytes.
    fn from_bytes(bytes: &[u8; HEADER as usize], len: u64) -> Result<Self, String> {
        if !bytes.starts_with(MAGIC) {
            return Err("not a Brigade image pack".into());
        }
        let number = |start: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[start..start + 8]);
            u64::from_le_bytes(number)
        };
        let version = number(8) as u32;
        if version != VERSION {
            return Err(format!("it has version {version}, this program reads {VERSION}"));
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(&bytes[48..80]);
        let parts = Self {
            images: number(16),
            table: number(24),
            words: number(32),
            end: number(40),
            digest,
        };
        if parts.to_bytes() != *bytes {
            return Err("its header is damaged".into());
        }
        let table_bytes = parts.images.checked_mul(ENTRY as u64);
        let in_order = parts.table >= HEADER
            && table_bytes.and_then(|bytes| parts.table.checked_add(bytes)) == Some(parts.words)
            && parts.words <= parts.end;
        if !in_order || parts.end != len {
            return Err(format!("it has {len} bytes, but its header declares {}", parts.end));
        }
        Ok(parts)
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    offset: u64,
    size: Size,
    checksum: u32,
    label: i64,
}

impl Entry {
    fn to_bytes(self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.label.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.size.width.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.size.height.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; ENTRY]) -> Self {
        let word = |start: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[start..start + 4]);
            u32::from_le_bytes(word)
        };
        let long = |start: usize| u64::from(word(start)) | u64::from(word(start + 4)) << 32;
        Self {
            offset: long(0),
            label: long(8).cast_signed(),
            size: Size::new(word(16), word(20)),
            checksum: word(24),
        }
    }
}

/// Images of a file that [`Packer`] wrote.
///
/// Header, table and names are checked when the file is opened, and an image's pixels when it is read for the first
/// time in a process.
#[derive(Debug)]
pub struct PackedImages {
    file: File,
    path: PathBuf,
    entries: Vec<Entry>,
    words: Words,
    digest: [u8; 32],
    verified: Vec<AtomicU64>,
}

impl PackedImages {
    /// Opens a pack: a file that [`Packer`] wrote.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not a complete pack.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let unreadable = |cause| ImageError::Read { path: path.clone(), cause };
        let unfit = |what: String| {
            ImageError::InvalidArgument(format!("cannot read {}: {what}", path.display()))
        };
        let file = File::open(&path).map_err(unreadable)?;
        let len = file.metadata().map_err(unreadable)?.len();
        let mut header = [0; HEADER as usize];
        file.read_exact_at(&mut header, 0).map_err(|_| unfit("not a Brigade image pack".into()))?;
        let parts = Parts::from_bytes(&header, len).map_err(unfit)?;
        // The file has these bytes: its length was compared.
        let read = |start: u64, end: u64| {
            let mut bytes = vec![0; usize::try_from(end - start).unwrap_or(usize::MAX)];
            file.read_exact_at(&mut bytes, start).map_err(unreadable).map(|()| bytes)
        };
        let (table, words) = (read(parts.table, parts.words)?, read(parts.words, parts.end)?);
        let mut digest = Sha256::new();
        digest.update(&table);
        digest.update(&words);
        if <[u8; 32]>::from(digest.finalize()) != parts.digest {
            return Err(unfit("its table is damaged".into()));
        }
        let words: Words = serde_json::from_slice(&words)
            .map_err(|error| unfit(format!("its names are damaged: {error}")))?;
        let entries: Vec<Entry> =
            table.as_chunks::<ENTRY>().0.iter().map(Entry::from_bytes).collect();
        for entry in &entries {
            let bytes = entry.size.bytes().filter(|bytes| *bytes > 0).map(|bytes| bytes as u64);
            let end = bytes.and_then(|bytes| entry.offset.checked_add(bytes));
            if entry.offset < HEADER || end.is_none_or(|end| end > parts.table) {
                return Err(unfit(format!(
                    "an image of {} pixels at byte {} does not lie in it",
                    entry.size, entry.offset
                )));
            }
        }
        if words.names.len() != entries.len() {
            return Err(unfit(format!(
                "it has {} for {}",
                counted(words.names.len(), "name"),
                counted(entries.len(), "image")
            )));
        }
        let verified = (0..entries.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { file, path, entries, words, digest: parts.digest, verified })
    }

    /// Opens a pack with its labels and classes.
    ///
    /// # Errors
    /// Returns the same errors as [`open`](PackedImages::open), and fails if a label is not the number of a class.
    pub fn labelled(path: impl Into<PathBuf>) -> Result<Labelled<Self>> {
        let packed = Self::open(path)?;
        let labels = packed.entries.iter().map(|entry| entry.label).collect();
        let categories = Categories::ordered(&packed.words.classes)?;
        Labelled::new(packed, labels, categories)
    }

    /// Returns the size of an image, or `None` if there is no image of this index.
    #[must_use]
    pub fn size(&self, index: usize) -> Option<Size> {
        self.entries.get(index).map(|entry| entry.size)
    }

    /// Returns the SHA-256 that covers all images, labels, names and classes.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }
}

impl ImageSource for PackedImages {
    fn len(&self) -> usize {
        self.entries.len()
    }

    /// Reads an image in the unencoded format of this crate, which [`ImageSamples`](crate::ImageSamples) accepts.
    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()> {
        let entry = self.entries.get(index).ok_or_else(|| {
            ImageError::InvalidArgument(format!(
                "image {index} is out of range: {} holds {}",
                self.path.display(),
                self.entries.len()
            ))
        })?;
        let pixels = raw::begin(entry.size, buffer).ok_or_else(|| {
            ImageError::InvalidArgument(format!(
                "there is no memory for an image of {} pixels",
                entry.size
            ))
        })?;
        self.file
            .read_exact_at(pixels, entry.offset)
            .map_err(|cause| ImageError::Read { path: self.path.clone(), cause })?;
        let (word, bit) = (self.verified.get(index / 64), 1 << (index % 64));
        if word.is_some_and(|word| word.load(Ordering::Relaxed) & bit != 0) {
            return Ok(());
        }
        if crc32fast::hash(pixels) != entry.checksum {
            return Err(ImageError::Decode {
                name: self.name(index).into_owned(),
                detail: format!("its pixels in {} are damaged", self.path.display()),
            });
        }
        if let Some(word) = word {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Ok(())
    }

    fn name(&self, index: usize) -> Cow<'_, str> {
        let name = self.words.names.get(index);
        name.map_or_else(|| format!("image {index}").into(), |name| name.as_str().into())
    }

    /// Hashes the [digest](PackedImages::digest).
    fn fingerprint(&self) -> Result<Fingerprint> {
        let mut hasher = Hasher::new("pack");
        hasher.bytes(&self.digest);
        Ok(hasher.finish())
    }
}
