//! The tags of the first image of a TIFF file.

use super::super::Problem;

/// Numbers of the tags that are read.
pub(super) mod tag {
    pub(in super::super) const WIDTH: u16 = 256;
    pub(in super::super) const HEIGHT: u16 = 257;
    pub(in super::super) const BITS: u16 = 258;
    pub(in super::super) const COMPRESSION: u16 = 259;
    pub(in super::super) const PHOTOMETRIC: u16 = 262;
    pub(in super::super) const FILL_ORDER: u16 = 266;
    pub(in super::super) const STRIP_OFFSETS: u16 = 273;
    pub(in super::super) const ORIENTATION: u16 = 274;
    pub(in super::super) const SAMPLES: u16 = 277;
    pub(in super::super) const ROWS_PER_STRIP: u16 = 278;
    pub(in super::super) const STRIP_LENGTHS: u16 = 279;
    pub(in super::super) const PLANAR: u16 = 284;
    pub(in super::super) const FAX_OPTIONS: u16 = 292;
    pub(in super::super) const PREDICTOR: u16 = 317;
    pub(in super::super) const COLOUR_MAP: u16 = 320;
    pub(in super::super) const TILE_WIDTH: u16 = 322;
    pub(in super::super) const TILE_HEIGHT: u16 = 323;
    pub(in super::super) const TILE_OFFSETS: u16 = 324;
    pub(in super::super) const TILE_LENGTHS: u16 = 325;
    pub(in super::super) const EXTRA_SAMPLES: u16 = 338;
    pub(in super::super) const FORMAT: u16 = 339;
    pub(in super::super) const JPEG_TABLES: u16 = 347;
}

/// The entries of a directory of tags.
pub(super) struct Directory<'a> {
    bytes: &'a [u8],
    pub(super) big_endian: bool,
    entries: Vec<Entry>,
}

struct Entry {
    tag: u16,
    /// Size of a value in bytes.
    width: usize,
    start: usize,
    count: usize,
}

impl<'a> Directory<'a> {
    /// Finds the first directory of a file, TIFF or BigTIFF.
    pub(super) fn first(bytes: &'a [u8]) -> Result<Self, Problem> {
        let big_endian = bytes.first() == Some(&b'M');
        let mut directory = Self { bytes, big_endian, entries: Vec::new() };
        let short = || Problem("its list of tags does not lie in the file".to_owned());
        // Offsets, counts and the values beside a tag have eight bytes in a BigTIFF.
        let (wide, start) = match directory.number(2, 2) {
            Some(43) => (8, directory.number(8, 8)),
            _ => (4, directory.number(4, 4)),
        };
        let start = start.and_then(|start| usize::try_from(start).ok()).ok_or_else(short)?;
        let length = if wide == 8 { 8 } else { 2 };
        let count = directory.number(start, length).ok_or_else(short)?;
        let size = 4 + 2 * wide;
        for number in 0..usize::try_from(count).map_err(|_| short())? {
            let at = number.checked_mul(size).and_then(|it| it.checked_add(start + length));
            let at = at.filter(|at| at.saturating_add(size) <= bytes.len()).ok_or_else(short)?;
            let (Some(tag), Some(kind), Some(count)) = (
                directory.number(at, 2),
                directory.number(at + 2, 2),
                directory.number(at + 4, wide).and_then(|count| usize::try_from(count).ok()),
            ) else {
                return Err(short());
            };
            let width = match kind {
                1 | 2 | 6 | 7 => 1,
                3 | 8 => 2,
                4 | 9 | 11 | 13 => 4,
                5 | 10 | 12 | 16..=18 => 8,
                _ => continue,
            };
            let beside = at + 4 + wide;
            let start = match count.checked_mul(width) {
                Some(length) if length <= wide => Some(beside as u64),
                Some(_) => directory.number(beside, wide),
                None => None,
            };
            // A tag whose values are outside of the file counts as absent; an image may not need it.
            let start = start.and_then(|start| usize::try_from(start).ok());
            let end = start.and_then(|start| start.checked_add(count * width));
            if let (Some(start), Some(..)) = (start, end.filter(|end| *end <= bytes.len())) {
                directory.entries.push(Entry { tag: tag as u16, width, start, count });
            }
        }
        Ok(directory)
    }

    fn number(&self, at: usize, width: usize) -> Option<u64> {
        let bytes = self.bytes.get(at..at.checked_add(width)?)?;
        let add = |sum: u64, byte: &u8| sum << 8 | u64::from(*byte);
        Some(if self.big_endian {
            bytes.iter().fold(0, add)
        } else {
            bytes.iter().rev().fold(0, add)
        })
    }

    fn entry(&self, tag: u16) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.tag == tag)
    }

    /// Returns the values of a tag; none if it is absent.
    pub(super) fn values(&self, tag: u16) -> Vec<u64> {
        let Some(entry) = self.entry(tag) else { return Vec::new() };
        let at = |number: usize| entry.start + number * entry.width;
        (0..entry.count).filter_map(|number| self.number(at(number), entry.width)).collect()
    }

    pub(super) fn first_value(&self, tag: u16) -> Option<u64> {
        let entry = self.entry(tag).filter(|entry| entry.count > 0)?;
        self.number(entry.start, entry.width)
    }

    pub(super) fn bytes_of(&self, tag: u16) -> Option<&'a [u8]> {
        let entry = self.entry(tag)?;
        self.bytes.get(entry.start..entry.start + entry.count * entry.width)
    }
}
