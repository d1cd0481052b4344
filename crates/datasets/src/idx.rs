//! Reader of IDX files, plain or gzip: the format of MNIST and similar datasets.
//!
//! Two zero bytes, the type of the values (8: unsigned byte), the number of dimensions, each
//! dimension as a big-endian u32, then the values, last dimension fastest.
//! Source: the format's description on the MNIST page of LeCun, Cortes and Burges.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use brigade_torch::Result;
use flate2::bufread::GzDecoder;

use crate::DatasetError;

/// The content of an IDX file of unsigned bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdxFile {
    /// Shape of the data: `[count, height, width]` for images, `[count]` for labels.
    pub shape: Vec<usize>,
    /// Values, last dimension fastest. Their number is the product of the dimensions.
    pub data: Vec<u8>,
}

impl IdxFile {
    /// Reads the IDX file at `path`, which must contain unsigned bytes in `dimensions` dimensions (3 for images, 1 for
    /// labels). Compression is detected by the first two bytes, not by the name.
    ///
    /// # Errors
    /// Fails if the file is missing, empty, truncated, too long or damaged, or has another magic number. Each error
    /// contains the path, what was expected and what was found.
    pub fn open(path: impl AsRef<Path>, dimensions: usize) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|cause| read_error(path, cause))?;
        Self::read(BufReader::new(file), path, dimensions)
    }

    /// Reads an IDX file from any reader. `path` is used in error messages only.
    ///
    /// ```
    /// use brigade_datasets::IdxFile;
    ///
    /// let bytes = [0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9];
    /// let labels = IdxFile::read(&bytes[..], "labels".as_ref(), 1)?;
    /// assert_eq!((labels.shape, labels.data), (vec![3], vec![7, 8, 9]));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`IdxFile::open`].
    pub fn read(mut bytes: impl BufRead, path: &Path, dimensions: usize) -> Result<Self> {
        let start = bytes.fill_buf().map_err(|cause| read_error(path, cause))?;
        if start.is_empty() {
            return Err(DatasetError::EmptyFile { path: path.into() }.into());
        }
        let file = if start.starts_with(&GZIP_MAGIC) {
            let inner =
                Unpacked { decoder: GzDecoder::new(Counted { inner: bytes, bytes: 0 }), bytes: 0 };
            Reader { inner, gzip: true, path, found: 0 }.file(dimensions)
        } else {
            Reader { inner: bytes, gzip: false, path, found: 0 }.file(dimensions)
        };
        Ok(file?)
    }
}

/// Reader of the content of a gzip stream, limited in how far a small file may expand.
struct Unpacked<R> {
    decoder: GzDecoder<Counted<R>>,
    bytes: u64,
}

impl<R: BufRead> Read for Unpacked<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.decoder.read(to)?;
        self.bytes += count as u64;
        let packed = self.decoder.get_ref().bytes;
        if self.bytes > MAX_EXPANSION * packed + FREE_EXPANSION_BYTES {
            Err(io::ErrorKind::FileTooLarge.into())
        } else {
            Ok(count)
        }
    }
}

/// A reader that counts the bytes that are read from it.
struct Counted<R> {
    inner: R,
    bytes: u64,
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(to)?;
        self.bytes += count as u64;
        Ok(count)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.inner.consume(count);
        self.bytes += count as u64;
    }
}

/// A reader that counts bytes for its error messages.
struct Reader<'a, R> {
    inner: R,
    gzip: bool,
    path: &'a Path,
    found: u64,
}

impl<R: Read> Reader<'_, R> {
    fn file(mut self, dimensions: usize) -> Result<IdxFile, DatasetError> {
        let header_len = 4 + 4 * dimensions as u64;
        let mut header = Vec::new();
        self.append(&mut header, header_len)?;

        let expected = MAGIC_UNSIGNED_BYTE | dimensions as u32;
        let magic = header.get(..4).map(big_endian);
        if let Some(found) = magic.filter(|found| *found != expected) {
            return Err(DatasetError::Magic {
                path: self.path.into(),
                dimensions,
                expected,
                found,
            });
        }
        if (header.len() as u64) < header_len {
            return Err(self.truncated(header_len));
        }

        let shape: Vec<usize> =
            header[4..].chunks_exact(4).map(|field| big_endian(field) as usize).collect();
        let len = shape.iter().try_fold(1usize, |len, dimension| len.checked_mul(*dimension));
        let pixels_per_item: usize = shape.iter().skip(1).copied().fold(1, usize::saturating_mul);
        let Some(len) = len.filter(|len| *len < MAX_LEN && pixels_per_item > 0) else {
            return Err(DatasetError::Shape { path: self.path.into(), shape });
        };

        let total = header_len + len as u64;
        // One byte more than announced: this detects trailing bytes, and at the end of a gzip stream it makes the
        // decoder compare the checksum.
        let mut data = Vec::with_capacity(len.min(MAX_FIRST_ALLOCATION) + 1);
        self.append(&mut data, len as u64 + 1)?;
        data.shrink_to_fit();
        match data.len() {
            found if found < len => Err(self.truncated(total)),
            found if found > len => {
                Err(DatasetError::TrailingBytes { path: self.path.into(), expected: total })
            }
            _ => Ok(IdxFile { shape, data }),
        }
    }

    /// Appends up to `limit` bytes, fewer only at the end of the data.
    fn append(&mut self, to: &mut Vec<u8>, limit: u64) -> Result<(), DatasetError> {
        let before = to.len();
        let result = self.inner.by_ref().take(limit).read_to_end(to);
        self.found += (to.len() - before) as u64;
        match result {
            Ok(_) => Ok(()),
            Err(cause) if self.gzip && cause.kind() == io::ErrorKind::FileTooLarge => {
                Err(DatasetError::Expansion { path: self.path.into(), found: self.found })
            }
            Err(cause) if self.gzip && is_damage(&cause) => {
                Err(DatasetError::Gzip { path: self.path.into(), found: self.found, cause })
            }
            Err(cause) => Err(read_error(self.path, cause)),
        }
    }

    fn truncated(&self, expected: u64) -> DatasetError {
        DatasetError::Truncated { path: self.path.into(), expected, found: self.found }
    }
}

fn big_endian(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

/// Returns `true` for the kinds of errors by which the gzip decoder reports bad data, unlike those of a disk.
fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(error.kind(), Kind::UnexpectedEof | Kind::InvalidData | Kind::InvalidInput)
}

fn read_error(path: &Path, cause: io::Error) -> DatasetError {
    DatasetError::Read { path: path.into(), cause }
}

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const MAGIC_UNSIGNED_BYTE: u32 = 0x0800;
/// A larger length is invalid: a `Vec` cannot be longer.
const MAX_LEN: usize = isize::MAX as usize - 64;
/// A header may be wrong: memory beyond this is only allocated as data arrives.
const MAX_FIRST_ALLOCATION: usize = 1 << 20;
/// Factor by which a gzip file may expand. The format allows 1032; images expand tenfold at most.
const MAX_EXPANSION: u64 = 200;
/// Added to that limit, because sorted labels are one byte repeated.
const FREE_EXPANSION_BYTES: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn idx(magic: u32, dims: &[u32], data: &[u8]) -> Vec<u8> {
        let mut bytes = magic.to_be_bytes().to_vec();
        dims.iter().for_each(|dim| bytes.extend(dim.to_be_bytes()));
        bytes.extend(data);
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: &[u8], dimensions: usize) -> Result<IdxFile, String> {
        IdxFile::read(bytes, Path::new("f"), dimensions).map_err(|error| error.to_string())
    }

    #[test]
    fn plain_and_gzip_are_equal() {
        let pixels: Vec<u8> = (0..2 * 3 * 4).collect();
        let bytes = idx(0x0803, &[2, 3, 4], &pixels);
        let plain = read(&bytes, 3).unwrap();
        assert_eq!(plain, IdxFile { shape: vec![2, 3, 4], data: pixels });
        assert_eq!(read(&gzip(&bytes), 3).unwrap(), plain);
        assert_eq!(read(&idx(0x0801, &[0], &[]), 1).unwrap().data, Vec::<u8>::new());
    }

    #[test]
    fn a_bad_file_says_what_is_wrong_with_it() {
        let good = idx(0x0803, &[2, 2, 2], &[9; 8]);
        let squeezed = gzip(&good);
        let mut flipped = squeezed.clone();
        let crc = flipped.len() - 8;
        flipped[crc] ^= 1;
        let mut body = gzip(&idx(0x0803, &[100, 10, 10], &[7; 10_000]));
        body[12] ^= 0xff;

        let table: &[(&str, Vec<u8>, &str)] = &[
            ("empty", vec![], "f is empty: expected an IDX file"),
            (
                "labels for images",
                idx(0x0801, &[8], &[1; 8]),
                "3 dimensions: expected magic number 0x00000803, found 0x00000801",
            ),
            ("another type", idx(0x0D03, &[1, 1, 1], &[0; 4]), "found 0x00000d03"),
            ("text", b"<html>not here</html>".to_vec(), "found 0x3c68746d"),
            ("three bytes", vec![0, 0, 8], "f is truncated: expected 16 bytes, found 3"),
            ("half a header", good[..10].to_vec(), "f is truncated: expected 16 bytes, found 10"),
            ("one byte short", good[..23].to_vec(), "truncated: expected 24 bytes, found 23"),
            ("header only", good[..16].to_vec(), "truncated: expected 24 bytes, found 16"),
            (
                "one byte more",
                [&good[..], &[0]].concat(),
                "f has more than 24 bytes, the size that its header declares",
            ),
            ("no pixels", idx(0x0803, &[5, 0, 28], &[]), "shape [5, 0, 28]"),
            (
                "more than memory",
                idx(0x0803, &[u32::MAX; 3], &[1; 9]),
                "shape [4294967295, 4294967295, 4294967295]",
            ),
            (
                "a lie that would take a gigabyte",
                idx(0x0803, &[1 << 20, 32, 32], &[1; 9]),
                "truncated: expected 1073741840 bytes, found 25",
            ),
            ("gzip cut", squeezed[..squeezed.len() - 12].to_vec(), "f is a damaged gzip file"),
            ("gzip without checksum", squeezed[..squeezed.len() - 4].to_vec(), "after 24 good"),
            ("gzip header only", squeezed[..6].to_vec(), "f is a damaged gzip file"),
            ("gzip with another checksum", flipped, "f is a damaged gzip file"),
            ("gzip with a damaged body", body, "f is a damaged gzip file"),
            ("gzip of nothing", gzip(b""), "f is truncated: expected 16 bytes, found 0"),
            ("gzip of half", gzip(&good[..20]), "truncated: expected 24 bytes, found 20"),
        ];
        for (name, bytes, expected) in table {
            let error = read(bytes, 3).expect_err(name);
            assert!(error.contains(expected), "{name}: {error}");
        }
    }

    #[test]
    fn a_small_gzip_file_does_not_become_a_large_one() {
        let bomb = gzip(&idx(0x0803, &[1, 8 << 10, 2 << 10], &vec![0; 16 << 20]));
        assert!(bomb.len() < 20_000);
        let error = read(&bomb, 3).unwrap_err();
        assert!(error.contains("f would take more than 4"), "{error}");
        assert!(error.contains("unpack it"), "{error}");
        // Labels in their order.
        let labels: Vec<u8> = (0..10).flat_map(|label| vec![label; 100_000]).collect();
        let packed = gzip(&idx(0x0801, &[1_000_000], &labels));
        assert!(packed.len() < 5_000);
        assert_eq!(read(&packed, 1).unwrap().data, labels);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = IdxFile::open("/nowhere/train-images", 3).unwrap_err().to_string();
        assert!(error.starts_with("cannot read /nowhere/train-images: "), "{error}");
    }
}
