//! Tells a file's format from its first bytes, not from its name.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::Error;

/// A format of weights files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// [`crate::safetensors`].
    Safetensors,
    /// [`crate::pth`].
    Pth,
}

impl Format {
    /// The format of an open file that was not read from yet.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::UnknownFormat`]; [`Error::LegacyPth`].
    pub fn of(path: &Path, file: &File) -> Result<Self, Error> {
        let mut start = Vec::with_capacity(START_BYTES);
        let mut reader = file.take(START_BYTES as u64);
        reader.read_to_end(&mut start).map_err(Error::io("read", path))?;
        if start.starts_with(ZIP_MAGIC) {
            return Ok(Self::Pth);
        }
        // A safetensors file begins with the length of its header, whose lowest byte is any.
        let header_begins = start.get(8) == Some(&b'{');
        let is_length = start.get(4..8) == Some(&[0; 4]);
        let is_pickle = start.first() == Some(&PICKLE_PROTOCOL);
        if header_begins && (is_length || !is_pickle) {
            return Ok(Self::Safetensors);
        }
        if is_pickle {
            return Err(Error::LegacyPth { path: path.to_owned() });
        }
        let fact = match start.as_slice() {
            [] => "it is empty".to_owned(),
            bytes => format!("it begins with the bytes {bytes:02x?}"),
        };
        Err(Error::UnknownFormat { path: path.to_owned(), fact })
    }
}

const START_BYTES: usize = 9;
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";
/// The first byte of a pickle, and so of torch.save's old format.
const PICKLE_PROTOCOL: u8 = 0x80;

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn format(start: &[u8]) -> Result<Format, Error> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(start).unwrap();
        file.rewind().unwrap();
        Format::of(Path::new("file"), &file)
    }

    #[test]
    fn a_header_of_any_length_is_safetensors() {
        for length in (0..4096u64).step_by(8) {
            let mut start = length.to_le_bytes().to_vec();
            start.extend(b"{\"__metadata__\"");
            assert!(matches!(format(&start), Ok(Format::Safetensors)), "{length}");
        }
    }

    #[test]
    fn pickles_without_a_zip_archive_are_told_apart() {
        // torch.save's magic number; and a pickle whose ninth byte is a brace.
        for start in [&b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."[..], b"\x80\x04\x95\x01abcd{"]
        {
            assert!(matches!(format(start), Err(Error::LegacyPth { .. })), "{start:?}");
        }
    }
}
