//! The headers of the pages of a column, looked at before the reader takes the memory that they claim.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use parquet::basic::Compression;
use parquet::file::metadata::ColumnChunkMetaData;

/// Checks that no page of a column claims more bytes than its compressed ones can hold: the reader takes
/// that memory before it has seen them.
pub(crate) fn check(path: &Path, chunk: &ColumnChunkMetaData) -> Result<(), String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let (start, length) = chunk.byte_range();
    let end = start.checked_add(length).ok_or("a column of more than 2^64 bytes")?;
    let mut offset = start;
    let mut window = Vec::new();
    while offset < end {
        let (header, size) = read(&file, offset, end, &mut window)?;
        let rest = end - offset - size as u64;
        let Header { uncompressed, compressed, levels } = header;
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
        if matches!(chunk.compression(), Compression::BROTLI(_)) {
            // Ten bytes may hold 16 MiB, and the reader takes whatever comes.
            let mut page = vec![0; compressed as usize];
            file.read_exact_at(&mut page, offset + size as u64)
                .map_err(|error| format!("a page at {offset}: {error}"))?;
            let data = page.get(levels as usize..).unwrap_or_default();
            let limit = u64::from(uncompressed) + 1;
            let reader = brotli_decompressor::Decompressor::new(data, 4096);
            let length = io::copy(&mut reader.take(limit), &mut io::sink());
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

/// The most bytes that so many compressed ones can become.
fn limit(compression: Compression, bytes: u64) -> u64 {
    let times = match compression {
        Compression::UNCOMPRESSED => return bytes,
        // A copy of 64 bytes takes three.
        Compression::SNAPPY => 24,
        // 255 for each byte of a length.
        Compression::LZ4 | Compression::LZ4_RAW | Compression::LZO => 256,
        Compression::GZIP(_) => 1_040,
        // A block of 128 KiB of one byte takes four.
        Compression::ZSTD(_) => 43_691,
        // A copy of 16 MiB takes some ten bytes: a page is a megabyte unless it has one value of more.
        Compression::BROTLI(_) => return BROTLI_COPY.saturating_add(bytes.saturating_mul(43_691)),
    };
    64 + bytes.saturating_mul(times)
}

/// What a few bytes of Brotli can hold.
const BROTLI_COPY: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    uncompressed: u32,
    compressed: u32,
    /// Bytes before the compressed ones, in pages of the second kind.
    levels: u32,
}

/// Reads the header at `offset` and returns it with its size.
fn read(
    file: &File,
    offset: u64,
    end: u64,
    window: &mut Vec<u8>,
) -> Result<(Header, usize), String> {
    // Statistics in a header hold values, so it can be as long as an image.
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

/// Of a header, statistics with an image or two included.
const LONGEST: usize = 64 << 20;

enum Bad {
    /// The bytes end before the header does.
    Short,
    Other,
}

/// Thrift's compact protocol, as far as the structure `PageHeader` needs it: four numbers are taken, the
/// rest is passed over.
struct Compact<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Compact<'_> {
    fn header(&mut self) -> Result<Header, Bad> {
        let (mut uncompressed, mut compressed) = (None, None);
        let mut levels = 0_i64;
        let mut field = 0;
        while let Some(kind) = self.field(&mut field)? {
            match (field, kind) {
                (2, 5) => uncompressed = Some(self.signed()?),
                (3, 5) => compressed = Some(self.signed()?),
                (8, 12) => {
                    let mut field = 0;
                    while let Some(kind) = self.field(&mut field)? {
                        match (field, kind) {
                            (5 | 6, 5) => levels = levels.saturating_add(self.signed()?),
                            _ => self.pass(kind, 1)?,
                        }
                    }
                }
                _ => self.pass(kind, 0)?,
            }
        }
        let size = |number: Option<i64>| number.and_then(|it| u32::try_from(it).ok());
        match (size(uncompressed), size(compressed), size(Some(levels))) {
            (Some(uncompressed), Some(compressed), Some(levels)) => {
                Ok(Header { uncompressed, compressed, levels })
            }
            _ => Err(Bad::Other),
        }
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

    /// The kind of the next field, `None` at the end of the structure.
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
        // A header has three levels.
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
                    // In a list, a truth value has a byte of its own.
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
