//! Checks of the page headers of a column, before the reader allocates the memory that they declare.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use flate2::read::MultiGzDecoder;
use parquet::basic::Compression;
use parquet::file::metadata::ColumnChunkMetaData;

/// Checks that no page of a column declares more bytes than its compressed data can decode to. The reader allocates
/// that memory before it decompresses.
pub(crate) fn check(path: &Path, chunk: &ColumnChunkMetaData) -> Result<(), String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let (start, length) = chunk.byte_range();
    let end = start.checked_add(length).ok_or("a column of more than 2^64 bytes")?;
    let mut offset = start;
    let mut window = Vec::new();
    while offset < end {
        let (header, size) = read(&file, offset, end, &mut window)?;
        let rest = end - offset - size as u64;
        let Header { uncompressed, compressed, levels, is_compressed } = header;
        if u64::from(compressed) > rest {
            return Err(format!(
                "a page at {offset} claims {compressed} bytes, and {rest} follow in its column"
            ));
        }
        let limit = limit(chunk.compression(), u64::from(compressed));
        if u64::from(uncompressed) > limit {
            return Err(format!(
                "a page at {offset} claims {uncompressed} bytes from {compressed}, which {} cannot hold",
                chunk.compression()
            ));
        }
        // The reader decodes these without a limit: ten bytes of Brotli may become 16 MiB.
        let unbounded =
            matches!(chunk.compression(), Compression::BROTLI(_) | Compression::GZIP(_));
        if is_compressed && unbounded {
            let mut page = vec![0; compressed as usize];
            file.read_exact_at(&mut page, offset + size as u64)
                .map_err(|error| format!("a page at {offset}: {error}"))?;
            let data = page.get(levels as usize..).unwrap_or_default();
            let limit = u64::from(uncompressed) + 1;
            let mut reader: Box<dyn Read> = match chunk.compression() {
                Compression::GZIP(_) => Box::new(MultiGzDecoder::new(data)),
                _ => Box::new(brotli_decompressor::Decompressor::new(data, 4096)),
            };
            let length = io::copy(&mut reader.by_ref().take(limit), &mut io::sink());
            if length.is_ok_and(|length| length + u64::from(levels) >= limit) {
                return Err(format!(
                    "a page at {offset} holds more than the {uncompressed} bytes it claims"
                ));
            }
        }
        offset += size as u64 + u64::from(compressed);
    }
    Ok(())
}

/// Returns the maximum size that `bytes` compressed bytes can decode to.
fn limit(compression: Compression, bytes: u64) -> u64 {
    let times = match compression {
        Compression::UNCOMPRESSED => return bytes,
        // A copy of 64 bytes takes three bytes.
        Compression::SNAPPY => 24,
        // Each byte of a length stands for up to 255 bytes.
        Compression::LZ4 | Compression::LZ4_RAW | Compression::LZO => 256,
        Compression::GZIP(_) => 1_040,
        // A block of 128 KiB of one repeated byte takes four bytes.
        Compression::ZSTD(_) => 43_691,
        // A copy of 16 MiB takes about ten bytes. A page is at most a megabyte, unless one value is longer.
        Compression::BROTLI(_) => return BROTLI_COPY.saturating_add(bytes.saturating_mul(43_691)),
    };
    64 + bytes.saturating_mul(times)
}

/// Maximum size that a few bytes of Brotli can decode to.
const BROTLI_COPY: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    uncompressed: u32,
    compressed: u32,
    /// Bytes of repetition and definition levels before the compressed data, in pages of version 2.
    levels: u32,
    /// `true` if the data after the levels is compressed, provided that the column is.
    is_compressed: bool,
}

/// Reads the page header at `offset` and returns it with its size.
fn read(
    file: &File,
    offset: u64,
    end: u64,
    window: &mut Vec<u8>,
) -> Result<(Header, usize), String> {
    // Statistics in a header hold values, so a header can be as long as an image.
    let most = usize::try_from(end - offset).map_or(LONGEST, |rest| rest.min(LONGEST));
    let mut length = most.min(4 << 10);
    loop {
        window.resize(length, 0);
        file.read_exact_at(window, offset)
            .map_err(|error| format!("a page at {offset}: {error}"))?;
        let mut reader = Compact { bytes: window, at: 0 };
        match reader.header() {
            Ok(header) => return Ok((header, reader.at)),
            Err(Bad::Short) if length < most => length = most.min(length.saturating_mul(8)),
            Err(Bad::Short) => {
                return Err(format!("the header of a page at {offset} has no end in {most} bytes"));
            }
            Err(Bad::Other) => return Err(format!("the header of a page at {offset} is damaged")),
        }
    }
}

/// Maximum size of a header, with an image or two in its statistics.
const LONGEST: usize = 64 << 20;

enum Bad {
    /// The bytes end before the end of the header.
    Short,
    Other,
}

/// Type codes of Thrift's compact protocol.
const FALSE: u8 = 2;
const I32: u8 = 5;
const STRUCT: u8 = 12;

/// Types of the first fields of `PageHeader` and of its nested structures, from field 1 on. The crate `parquet` reads
/// these fields by their numbers and ignores their declared types.
const PAGE: &[u8] = &[I32, I32, I32, I32, STRUCT, STRUCT, STRUCT, STRUCT];
const DATA_PAGE: &[u8] = &[I32; 4];
const DICTIONARY_PAGE: &[u8] = &[I32; 2];
const DATA_PAGE_V2: &[u8] = &[I32; 6];

/// Fields of a structure that have been read.
#[derive(Default)]
struct Fields {
    last: i16,
    seen: u16,
}

/// A reader of Thrift's compact protocol, limited to the structure `PageHeader`: takes four numbers and a boolean and
/// skips the rest. Refuses whatever `parquet` would read differently: repeated fields, fields of another type, and
/// numbers that are too large.
struct Compact<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Compact<'_> {
    fn header(&mut self) -> Result<Header, Bad> {
        let (mut uncompressed, mut compressed) = (None, None);
        let (mut levels, mut is_compressed) = (0_u32, true);
        let mut fields = Fields::default();
        while let Some(kind) = self.known_field(&mut fields, PAGE)? {
            match fields.last {
                2 => uncompressed = Some(self.size()?),
                3 => compressed = Some(self.size()?),
                5 => self.pass_fields(DATA_PAGE)?,
                7 => self.pass_fields(DICTIONARY_PAGE)?,
                8 => {
                    let mut fields = Fields::default();
                    while let Some(kind) = self.known_field(&mut fields, DATA_PAGE_V2)? {
                        match fields.last {
                            5 | 6 => levels += self.size()?,
                            7 => {
                                is_compressed = kind != FALSE;
                                self.pass(kind, 1)?;
                            }
                            _ => self.pass(kind, 1)?,
                        }
                    }
                }
                _ => self.pass(kind, 0)?,
            }
        }
        let (Some(uncompressed), Some(compressed)) = (uncompressed, compressed) else {
            return Err(Bad::Other);
        };
        Ok(Header { uncompressed, compressed, levels, is_compressed })
    }

    /// Reads the header of a field and returns its type, or `None` at the end of the structure. Fails if a field
    /// repeats, or if its type is not the one in `types`.
    fn known_field(&mut self, fields: &mut Fields, types: &[u8]) -> Result<Option<u8>, Bad> {
        let mut number = i64::from(fields.last);
        let Some(kind) = self.field(&mut number)? else { return Ok(None) };
        fields.last = i16::try_from(number).map_err(|_| Bad::Other)?;
        let place = usize::try_from(number - 1).ok();
        if place.and_then(|place| types.get(place)).is_some_and(|expected| *expected != kind) {
            return Err(Bad::Other);
        }
        if let Some(bit @ 0..16) = place {
            if fields.seen & 1 << bit != 0 {
                return Err(Bad::Other);
            }
            fields.seen |= 1 << bit;
        }
        Ok(Some(kind))
    }

    fn pass_fields(&mut self, types: &[u8]) -> Result<(), Bad> {
        let mut fields = Fields::default();
        while let Some(kind) = self.known_field(&mut fields, types)? {
            self.pass(kind, 1)?;
        }
        Ok(())
    }

    /// Reads a non-negative 32-bit number.
    fn size(&mut self) -> Result<u32, Bad> {
        let number = i32::try_from(self.signed()?).ok();
        number.and_then(|number| u32::try_from(number).ok()).ok_or(Bad::Other)
    }

    fn byte(&mut self) -> Result<u8, Bad> {
        let byte = *self.bytes.get(self.at).ok_or(Bad::Short)?;
        self.at += 1;
        Ok(byte)
    }

    fn unsigned(&mut self) -> Result<u64, Bad> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Bad::Other)
    }

    fn signed(&mut self) -> Result<i64, Bad> {
        let number = self.unsigned()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    /// Reads the header of the next field and returns its type. `None` at the end of the structure.
    fn field(&mut self, field: &mut i64) -> Result<Option<u8>, Bad> {
        let byte = self.byte()?;
        if byte == 0 {
            return Ok(None);
        }
        *field = match byte >> 4 {
            0 => self.signed()?,
            step => field.saturating_add(i64::from(step)),
        };
        Ok(Some(byte & 0x0f))
    }

    fn skip(&mut self, bytes: u64) -> Result<(), Bad> {
        let to = usize::try_from(bytes).ok().and_then(|bytes| self.at.checked_add(bytes));
        self.at = to.filter(|to| *to <= self.bytes.len()).ok_or(Bad::Short)?;
        Ok(())
    }

    fn pass(&mut self, kind: u8, depth: usize) -> Result<(), Bad> {
        // A valid header has three levels.
        if depth > 8 {
            return Err(Bad::Other);
        }
        match kind {
            1 | 2 => Ok(()),
            3 => self.skip(1),
            4..=6 => self.unsigned().map(drop),
            7 => self.skip(8),
            8 => {
                let length = self.unsigned()?;
                self.skip(length)
            }
            9 | 10 => {
                let byte = self.byte()?;
                let length = match byte >> 4 {
                    15 => self.unsigned()?,
                    length => u64::from(length),
                };
                for _ in 0..length {
                    // Booleans in a list take one byte each.
                    match byte & 0x0f {
                        1 | 2 => self.skip(1)?,
                        kind => self.pass(kind, depth + 1)?,
                    }
                }
                Ok(())
            }
            12 => {
                let mut field = 0;
                while let Some(kind) = self.field(&mut field)? {
                    self.pass(kind, depth + 1)?;
                }
                Ok(())
            }
            _ => Err(Bad::Other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses the header of a version 2 page of 100 bytes, compressed to 50, with 3 and 4 bytes of levels. `more` is
    /// added to its fields, and `inner` to those of its nested structure.
    fn header(more: &[u8], inner: &[u8]) -> Result<Header, bool> {
        let page = [0x15, 6, 0x15, 200, 1, 0x15, 100];
        let levels = [0x15, 2, 0x15, 0, 0x15, 2, 0x15, 0, 0x15, 6, 0x15, 8];
        let bytes = [&page, more, &[0x0c, 16], &levels, inner, &[0, 0]].concat();
        let mut reader = Compact { bytes: &bytes, at: 0 };
        reader.header().map_err(|bad| matches!(bad, Bad::Other))
    }

    #[test]
    fn headers_say_what_the_reader_will_read() {
        let expected = Header { uncompressed: 100, compressed: 50, levels: 7, is_compressed: true };
        assert_eq!(header(&[], &[]), Ok(expected));
        assert_eq!(header(&[0x15, 2], &[0x11]), Ok(expected));
        let plain = Header { is_compressed: false, ..expected };
        assert_eq!(header(&[], &[0x12]), Ok(plain));
        // Fields unknown to the format.
        assert_eq!(header(&[0x05, 40, 2], &[0x05, 42, 2]), Ok(expected));
    }

    #[test]
    fn fields_that_are_read_in_two_ways_are_refused() {
        let refused = Err(true);
        for (more, what) in [
            (&[0x05, 4, 200, 1][..], "the size again"),
            (&[0x06, 4, 2], "the size again, of 64 bits"),
            (&[0x05, 6, 2], "the compressed size again"),
            (&[0x0c, 16, 0x56, 8, 0x16, 8, 0], "levels of 64 bits before those of 32"),
            (&[0x0c, 16, 0x55, 8, 0], "levels twice"),
            (&[0x18, 0], "a text for the checksum"),
            (&[0x05, 0x84, 0x80, 8, 2], "a field whose number is 2 of 16 bits"),
            (&[0x0c, 10, 0x18, 0, 0], "a text for the number of values"),
            (&[0x0c, 14, 0x18, 0, 0], "a text for the number of values of a dictionary"),
        ] {
            assert_eq!(header(more, &[]), refused, "{what}");
        }
        for (inner, what) in [
            (&[0x05, 10, 8][..], "levels again"),
            (&[0x06, 12, 8], "levels again, of 64 bits"),
            (&[0x11, 0x02, 14], "compressed, and not"),
            (&[0x08, 4, 0], "a text for the number of nulls"),
        ] {
            assert_eq!(header(&[], inner), refused, "{what}");
        }
        let number = |bytes: &[u8]| Compact { bytes, at: 0 }.size().ok();
        assert_eq!(number(&[8]), Some(4));
        assert_eq!((number(&[7]), number(&[0x88, 0x80, 0x80, 0x80, 0x20])), (None, None));
    }
}
