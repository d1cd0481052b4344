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
        if start.first() == Some(&PICKLE_PROTOCOL) {
            return Err(Error::LegacyPth { path: path.to_owned() });
        }
        if start.get(8) == Some(&b'{') {
            return Ok(Self::Safetensors);
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
