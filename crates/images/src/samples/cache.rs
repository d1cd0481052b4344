//! A file of decoded images, for use in later epochs.
//!
//! The file is read and written at offsets, not mapped: the page cache holds it once for all ranks either way, a copy
//! of a few rows costs less than a page fault every 4 KB, and a file that is cut short is an error that can be handled,
//! not SIGBUS.
//!
//! Layout, little-endian: a header of 64 bytes with a checksum, a counter of the allocated bytes, one entry of 32 bytes
//! for each image, then pixels. An entry is written after its pixels and contains a checksum of itself and one of them,
//! so that an image that was half-written before a crash counts as missing.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::image::{CropBox, Image, ImageView, Region, Size};
use crate::image_source::{Fingerprint, Hasher};
use crate::transforms::RegionReader;
use crate::{ImageError, Result};

/// Options of a cache, in which a dataset keeps decoded images of its first epoch for later ones.
///
/// The cached images are the results of the transforms before the first random one: for `Resize::shorter(256)` and a
/// random crop, the resized images; in validation, usually the images as they come into the batch. If the first
/// transform is random, such as `RandomResizedCrop`, images are cached as they are decoded, at full size unless
/// [`presize`](CacheOptions::presize) is set.
///
/// All processes that read the same images with the same first transforms share the file, at the same time and later;
/// others use other files in the same folder. Batches are the same with an empty cache, a full one and one without room
/// for all images.
///
/// The file belongs to the source's [fingerprint](crate::source::ImageSource::fingerprint) and the transforms. An image
/// that was replaced by another of the same name and size is decoded again: the cache also contains the
/// [version](crate::source::ImageSource::version) of each image, for which every file costs one system call, some
/// microseconds, when the first sample is read. If a file is replaced during a run, the next run detects it. The bytes
/// of the old image stay allocated; if there is no room left because of them, a warning recommends to remove the file.
///
/// A version includes the inode and the time of its last change, so that copies of a dataset in different places, and
/// one that was copied again, have other versions: they do not share a cache, and one folder for both fills up with the
/// images of each. Give each copy a cache of its own.
///
/// ```
/// use brigade_images::CacheOptions;
///
/// let cache = CacheOptions::new("cache").max_bytes(20 << 30).presize(256);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    folder: PathBuf,
    max_bytes: u64,
    presize: Option<u32>,
}

impl CacheOptions {
    /// Sets the folder, which is created if it does not exist. The cache is fast on a local disk if as much memory is
    /// free as the cache takes. The default limit is 8 GiB.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), max_bytes: 8 << 30, presize: None }
    }

    /// Sets the maximum size of all cached pixels in bytes. Images beyond that are decoded each time. Defaults to 8
    /// GiB.
    #[must_use]
    pub const fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Resizes images whose shorter side is longer than `side` to `side`, before all transforms, if the first of these
    /// is random: fastai's presizing. A random crop then chooses from the smaller image in every epoch, including the
    /// first. 1.5 times the side of the batch's images keeps all but the smallest crops sharp. Defaults to no
    /// presizing.
    #[must_use]
    pub const fn presize(mut self, side: u32) -> Self {
        self.presize = Some(side);
        self
    }

    pub(super) fn presize_side(&self) -> Option<u32> {
        self.presize
    }
}

const MAGIC: &[u8; 8] = b"BRIGIMGC";
const VERSION: u32 = 3;
const HEADER: usize = 64;
/// Position of the counter of allocated bytes.
const USED: u64 = 64;
const TABLE: u64 = 128;
const ENTRY: usize = 32;
/// Number of entries that are read at a time when the whole table is read.
const ENTRIES_AT_ONCE: usize = 4096;

/// An open cache file.
#[derive(Debug)]
pub(super) struct Cache {
    file: File,
    path: PathBuf,
    /// Stamp of each image: a hash of its number and version.
    stamps: Vec<u64>,
    max_bytes: u64,
    /// A bit for each image, set if this process has compared its pixels with their checksum.
    verified: Vec<AtomicU64>,
    /// Held while bytes are allocated, because the lock of the file is between processes only.
    taking: Mutex<()>,
    /// Set if there was no room, or a write failed.
    full: AtomicBool,
}

/// Position, size and checksum of an image's pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    offset: u64,
    size: Size,
    checksum: u32,
}

/// An image that was found in the cache.
pub(super) enum Cached<'a> {
    /// The image was read into the caller's memory.
    Read,
    /// The image is in the file, and its pixels were compared with their checksum before.
    Stored(StoredImage<'a>),
}

/// Reads regions of an image in the cache.
#[derive(Debug)]
pub(super) struct StoredImage<'a> {
    cache: &'a Cache,
    entry: Entry,
}

impl Cache {
    /// Opens or creates the file for images with these versions. `key` is a hash of the source and the cached
    /// transforms.
    pub(super) fn open(options: &CacheOptions, key: Fingerprint, versions: &[u64]) -> Result<Self> {
        let images = versions.len();
        let path = options.folder.join(format!("{key}.images"));
        let failed = |error| {
            ImageError::InvalidArgument(format!(
                "cannot keep images in the cache {}: {error}; give another folder",
                path.display()
            ))
        };
        fs::create_dir_all(&options.folder).map_err(failed)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        let cache = Self {
            file,
            path: path.clone(),
            stamps: (0..).zip(versions).map(|(image, version)| stamp(image, *version)).collect(),
            max_bytes: options.max_bytes,
            verified: (0..images.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            taking: Mutex::new(()),
            full: AtomicBool::new(false),
        };
        cache.file.lock().map_err(failed)?;
        let made = cache.make(&header(key, images));
        cache.file.unlock().map_err(failed)?;
        made.map_err(failed)?;
        Ok(cache)
    }

    /// Initializes the file, unless its header is `header` already. Must be called with the file's lock.
    fn make(&self, header: &[u8; HEADER]) -> io::Result<()> {
        let mut found = [0; HEADER];
        let whole = self.file.metadata()?.len() >= self.data_start();
        if whole && self.file.read_exact_at(&mut found, 0).is_ok() && found == *header {
            return Ok(());
        }
        self.file.set_len(0)?;
        self.file.set_len(self.data_start())?;
        self.file.write_all_at(header, 0)
    }

    /// Returns the position of the first pixels, which is the start of a page.
    fn data_start(&self) -> u64 {
        (TABLE + self.stamps.len() as u64 * ENTRY as u64).next_multiple_of(4096)
    }

    /// Finds an image. If this process reads it for the first time, the whole image is read into `memory` and compared
    /// with its checksum.
    pub(super) fn find(&self, image: usize, memory: &mut Image) -> Option<Cached<'_>> {
        let entry = self.entry(image)?;
        let (word, bit) = (self.verified.get(image / 64)?, 1 << (image % 64));
        if word.load(Ordering::Relaxed) & bit != 0 {
            return Some(Cached::Stored(StoredImage { cache: self, entry }));
        }
        let pixels = memory.reset(entry.size).ok()?;
        self.file.read_exact_at(pixels, entry.offset).ok()?;
        if crc32fast::hash(pixels) != entry.checksum {
            // Clears the entry, so that the image is cached again; if that fails, the checksum is wrong again next
            // time.
            let _ = self.file.write_all_at(&[0; ENTRY], Self::entry_offset(image));
            return None;
        }
        word.fetch_or(bit, Ordering::Relaxed);
        Some(Cached::Read)
    }

    fn entry_offset(image: usize) -> u64 {
        TABLE + image as u64 * ENTRY as u64
    }

    fn entry(&self, image: usize) -> Option<Entry> {
        let mut bytes = [0; ENTRY];
        let stamp = *self.stamps.get(image)?;
        self.file.read_exact_at(&mut bytes, Self::entry_offset(image)).ok()?;
        let entry = Entry::from_bytes(&bytes, stamp)?;
        // Checked against the length of the file, so that a wrong size does not allocate memory.
        let end = entry.offset.checked_add(entry.size.bytes()? as u64)?;
        let inside = entry.offset >= self.data_start() && end <= self.file.metadata().ok()?.len();
        inside.then_some(entry)
    }

    /// Caches an image, if there is room.
    pub(super) fn keep(&self, image: usize, pixels: ImageView<'_>) {
        if self.full.load(Ordering::Relaxed) || self.entry(image).is_some() {
            return;
        }
        match self.write(image, pixels) {
            Ok(true) => {}
            Ok(false) => {
                let first = !self.full.swap(true, Ordering::Relaxed);
                if let Some(warning) = first.then(|| self.warning_of_replaced()).flatten() {
                    tracing::warn!("{warning}");
                }
            }
            Err(error) => {
                self.full.store(true, Ordering::Relaxed);
                let path = self.path.display();
                tracing::warn!(%path, %error, "no more images are kept in the cache");
            }
        }
    }

    /// Writes an image. Returns `false` if there is not enough room.
    fn write(&self, image: usize, pixels: ImageView<'_>) -> io::Result<bool> {
        let Some(stamp) = self.stamps.get(image) else { return Ok(false) };
        let (size, pixels) = (pixels.size(), pixels.pixels());
        let Some(taken) = self.take(pixels.len() as u64)? else { return Ok(false) };
        let offset = self.data_start() + taken;
        self.file.write_all_at(pixels, offset)?;
        let entry = Entry { offset, size, checksum: crc32fast::hash(pixels) };
        self.file.write_all_at(&entry.to_bytes(*stamp), Self::entry_offset(image))?;
        Ok(true)
    }

    /// Allocates bytes for an image, and returns how many were allocated before; `None` if there is not enough room.
    fn take(&self, bytes: u64) -> io::Result<Option<u64>> {
        let _taking = self.taking.lock();
        self.file.lock()?;
        let taken = (|| {
            let mut counter = [0; 8];
            self.file.read_exact_at(&mut counter, USED)?;
            let used = u64::from_le_bytes(counter);
            match used.checked_add(bytes) {
                Some(end) if end <= self.max_bytes => {
                    self.file.write_all_at(&end.to_le_bytes(), USED)?;
                    Ok(Some(used))
                }
                _ => Ok(None),
            }
        })();
        self.file.unlock()?;
        taken
    }

    /// Returns a warning if replaced images take at least an eighth of the allocated bytes. Bytes of an image whose
    /// entry is not written yet are counted as well.
    fn warning_of_replaced(&self) -> Option<String> {
        let mut counter = [0; 8];
        self.file.read_exact_at(&mut counter, USED).ok()?;
        let used = u64::from_le_bytes(counter);
        let mut there = 0_u64;
        let mut table = vec![0; ENTRY * self.stamps.len().min(ENTRIES_AT_ONCE)];
        for (part, stamps) in self.stamps.chunks(ENTRIES_AT_ONCE).enumerate() {
            let table = table.get_mut(..ENTRY * stamps.len())?;
            self.file.read_exact_at(table, Self::entry_offset(part * ENTRIES_AT_ONCE)).ok()?;
            for (bytes, stamp) in table.as_chunks::<ENTRY>().0.iter().zip(stamps) {
                let size = Entry::from_bytes(bytes, *stamp).and_then(|entry| entry.size.bytes());
                there = there.saturating_add(size.unwrap_or_default() as u64);
            }
        }
        let replaced = used.saturating_sub(there);
        (replaced > 0 && replaced >= used / 8).then(|| {
            format!(
                "the cache {} is full, and {replaced} of its {used} bytes hold images that were \
                 replaced since; remove the file, and the next run creates it again",
                self.path.display()
            )
        })
    }

    #[cfg(test)]
    fn path(&self) -> &std::path::Path {
        &self.path
    }
}

impl Entry {
    fn to_bytes(self, stamp: u64) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.size.width.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.size.height.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[20..28].copy_from_slice(&stamp.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Parses an entry. Returns `None` if it was never written, or not completely, or for another version of the image.
    fn from_bytes(bytes: &[u8; ENTRY], stamp: u64) -> Option<Self> {
        let word = |start: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[start..start + 4]);
            u32::from_le_bytes(word)
        };
        let offset = u64::from(word(0)) | u64::from(word(4)) << 32;
        let entry = Self { offset, size: Size::new(word(8), word(12)), checksum: word(16) };
        (entry.size.pixels() > 0 && entry.to_bytes(stamp) == *bytes).then_some(entry)
    }
}

/// Returns a hash of an image's number and version.
fn stamp(image: u64, version: u64) -> u64 {
    let mut hasher = Hasher::new("stamp");
    hasher.number(image);
    hasher.number(version);
    hasher.finish().number()
}

fn header(key: Fingerprint, images: usize) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&(images as u64).to_le_bytes());
    bytes[24..56].copy_from_slice(key.as_bytes());
    let checksum = crc32fast::hash(&bytes[..56]);
    bytes[56..60].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

impl RegionReader for StoredImage<'_> {
    fn size(&self) -> Size {
        self.entry.size
    }

    /// Reads the rows of the region in one call.
    fn read(&mut self, region: Region, _: Option<Size>, target: &mut Image) -> Result<CropBox> {
        let Size { width, .. } = self.entry.size;
        let pixels = target.reset(Size::new(width, region.height))?;
        let rows = 3 * u64::from(width) * u64::from(region.top);
        self.cache
            .file
            .read_exact_at(pixels, self.entry.offset + rows)
            .map_err(|cause| ImageError::Read { path: self.cache.path.clone(), cause })?;
        Ok(Region { top: 0, ..region }.into())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn key(name: &str) -> Fingerprint {
        Hasher::new(name).finish()
    }

    fn open(folder: &Path, max_bytes: u64) -> Cache {
        let options = CacheOptions::new(folder).max_bytes(max_bytes);
        Cache::open(&options, key("one"), &[7; 100]).unwrap()
    }

    #[test]
    fn another_version_of_an_image_is_not_the_one_that_was_kept() {
        let folder = tempfile::tempdir().unwrap();
        let before = open(folder.path(), 1 << 20);
        before.keep(3, image(1).view());
        before.keep(4, image(2).view());
        let mut versions = [7; 100];
        versions[3] = 8;
        let options = CacheOptions::new(folder.path());
        let after = Cache::open(&options, key("one"), &versions).unwrap();
        assert_eq!((found(&after, 3), found(&after, 4)), (None, Some(image(2))));
        after.keep(3, image(5).view());
        assert_eq!(found(&after, 3), Some(image(5)));
        // It differs from the earlier version too.
        assert_eq!(found(&open(folder.path(), 1 << 20), 3), None);
    }

    fn image(value: u8) -> Image {
        Image::new(5, 4, (0..60).map(|place| place ^ value).collect()).unwrap()
    }

    /// Returns the whole cached image, if it is in the cache.
    fn found(cache: &Cache, number: usize) -> Option<Image> {
        let mut memory = Image::scratch();
        match cache.find(number, &mut memory)? {
            Cached::Read => Some(memory),
            Cached::Stored(mut stored) => {
                let whole = Region::whole(stored.size());
                stored.read(whole, None, &mut memory).unwrap();
                Some(memory)
            }
        }
    }

    #[test]
    fn images_come_back_to_all_who_share_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (open(folder.path(), 1 << 20), open(folder.path(), 1 << 20));
        assert_eq!(found(&one, 7), None);
        one.keep(7, image(1).view());
        other.keep(99, image(2).view());
        other.keep(7, image(3).view());
        for cache in [&one, &other, &open(folder.path(), 0)] {
            // Twice: before and after the pixels were compared with their checksum.
            for _ in 0..2 {
                assert_eq!(found(cache, 7), Some(image(1)));
                assert_eq!(found(cache, 99), Some(image(2)));
            }
            assert_eq!((found(cache, 8), found(cache, 100)), (None, None));
        }
        let mut memory = Image::scratch();
        let Some(Cached::Stored(mut stored)) = one.find(7, &mut memory) else { panic!() };
        let region = Region { left: 2, top: 1, width: 2, height: 2 };
        let place = stored.read(region, None, &mut memory).unwrap();
        assert_eq!((place.left, place.top, memory.size()), (2.0, 0.0, Size::new(5, 2)));
        assert_eq!(memory.pixel(2, 0), image(1).pixel(2, 1));

        let options = CacheOptions::new(folder.path());
        let others = Cache::open(&options, key("other"), &[7; 100]).unwrap();
        assert_eq!(found(&others, 7), None);
        assert_ne!(others.path(), one.path());
    }

    #[test]
    fn no_more_bytes_are_taken_than_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = open(folder.path(), 150);
        for number in 0..4 {
            cache.keep(number, image(number as u8).view());
        }
        assert_eq!(found(&cache, 1), Some(image(1)));
        assert_eq!(found(&cache, 2), None);
        assert!(cache.path().metadata().unwrap().len() <= cache.data_start() + 150);
    }

    #[test]
    fn a_cache_that_is_full_of_replaced_images_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let options = CacheOptions::new(folder.path()).max_bytes(150);
        let before = Cache::open(&options, key("many"), &[7; 5000]).unwrap();
        before.keep(0, image(1).view());
        before.keep(4999, image(2).view());
        assert_eq!(before.warning_of_replaced(), None);
        before.keep(1, image(3).view());
        assert!(before.full.load(Ordering::Relaxed));
        assert_eq!(before.warning_of_replaced(), None);

        let mut versions = [7; 5000];
        versions[4999] = 8;
        let after = Cache::open(&options, key("many"), &versions).unwrap();
        after.keep(4999, image(2).view());
        assert_eq!((found(&after, 0), found(&after, 4999)), (Some(image(1)), None));
        let expected = format!(
            "the cache {} is full, and 60 of its 120 bytes hold images that were replaced since; \
             remove the file, and the next run creates it again",
            after.path().display()
        );
        assert_eq!(after.warning_of_replaced(), Some(expected));
        fs::remove_file(after.path()).unwrap();
        let anew = Cache::open(&options, key("many"), &versions).unwrap();
        anew.keep(4999, image(2).view());
        assert_eq!(found(&anew, 4999), Some(image(2)));
    }

    #[test]
    fn what_a_crash_left_half_written_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let cache = open(folder.path(), 1 << 20);
        for number in 0..3 {
            cache.keep(number, image(number as u8).view());
        }
        let file = OpenOptions::new().write(true).open(cache.path()).unwrap();
        // The pixels of one image with the entry of another.
        file.write_all_at(&[0xEE; 10], cache.data_start() + 70).unwrap();
        file.write_all_at(&[0; 12], Cache::entry_offset(2) + 4).unwrap();
        let after = open(folder.path(), 1 << 20);
        assert_eq!(found(&after, 0), Some(image(0)));
        assert_eq!((found(&after, 1), found(&after, 2)), (None, None));
        for number in [1, 2] {
            after.keep(number, image(9).view());
            assert_eq!(found(&after, number), Some(image(9)));
        }

        // The file was cut short, then its header lost.
        file.set_len(cache.data_start() + 30).unwrap();
        assert_eq!(found(&open(folder.path(), 1 << 20), 0), None);
        file.write_all_at(b"X", 3).unwrap();
        let anew = open(folder.path(), 1 << 20);
        assert_eq!(found(&anew, 0), None);
        anew.keep(0, image(4).view());
        assert_eq!(found(&anew, 0), Some(image(4)));
    }
}
