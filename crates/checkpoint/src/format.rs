//! Tells a file's format from its first bytes, not from its name.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::Error;
use crate::other_format::{START_BYTES, describe};

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
    /// [`Error::Io`]; [`Error::UnknownFormat`]; [`Error::Unsupported`] for the tar archives of PyTorch before
    /// 0.1.10.
    pub fn of(path: &Path, file: &File) -> Result<Self, Error> {
        let mut start = Vec::with_capacity(START_BYTES);
        let mut reader = file.take(START_BYTES as u64);
        reader.read_to_end(&mut start).map_err(Error::io("read", path))?;
        if start.starts_with(ZIP_MAGIC) || begins_legacy(&start) {
            return Ok(Self::Pth);
        }
        if begins_tar(&start) {
            return Err(Error::Unsupported { path: path.to_owned(), fact: TAR.into() });
        }
        // A safetensors file begins with the length of its header, whose lowest byte is any.
        let header_begins = start.get(8) == Some(&b'{');
        let is_length = start.get(4..8) == Some(&[0; 4]);
        let is_pickle = start.first() == Some(&PICKLE_PROTOCOL);
        let is_text =
            start.iter().take(8).all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
        if header_begins && (is_length || !is_pickle && !is_text) {
            return Ok(Self::Safetensors);
        }
        let fact = if is_pickle {
            "it is a pickle, but not one that torch.save has written".to_owned()
        } else {
            let length = file.metadata().map_err(Error::io("read", path))?.len();
            describe(&start, length)
        };
        Err(Error::UnknownFormat { path: path.to_owned(), fact })
    }
}

/// Whether a file that begins with these bytes is in the old format. 262 are enough to tell.
pub(crate) fn begins_legacy(start: &[u8]) -> bool {
    let Some(([0x80, _protocol], rest)) = start.split_at_checked(2) else { return false };
    // The length of a frame, which protocols 4 and 5 have.
    let rest = if rest.first() == Some(&0x95) { rest.get(9..).unwrap_or_default() } else { rest };
    rest.starts_with(MAGIC)
}

/// Whether a file that begins with these bytes is in the format before PyTorch 0.1.10: a tar archive, whose
/// first entry is one of four names.
fn begins_tar(start: &[u8]) -> bool {
    let name = start.split(|&byte| byte == 0).next().unwrap_or_default();
    start.get(257..262) == Some(b"ustar") && TAR_ENTRIES.contains(&name)
}

/// What tells the old formats from others.
/// LONG1 of 0x1950a86a20f9469cfc6c, and STOP.
const MAGIC: &[u8] = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
const TAR_ENTRIES: [&[u8]; 4] = [b"sys_info", b"pickle", b"tensors", b"storages"];
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";
/// The first byte of a pickle.
const PICKLE_PROTOCOL: u8 = 0x80;
const TAR: &str = "it is in the tar format of torch.save before PyTorch 0.1.10, which only PyTorch reads; \
                   if you trust it, load it there with `torch.load(path, weights_only=False)`, and \
                   `torch.save` its state dictionary again";

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
        // torch.save's magic number, in protocols 2 and 4.
        let magic = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
        for start in [&b"\x80\x02"[..], b"\x80\x04\x95\x0d\0\0\0\0\0\0\0"] {
            assert!(matches!(format(&[start, magic].concat()), Ok(Format::Pth)), "{start:?}");
        }
        // A pickle whose ninth byte is a brace.
        let error = format(b"\x80\x04\x95\x01abcd{").unwrap_err().to_string();
        assert!(error.contains("a pickle, but not one that torch.save has written"), "{error}");
    }

    #[test]
    fn a_tar_archive_is_named() {
        let mut tar = b"sys_info".to_vec();
        tar.resize(257, 0);
        tar.extend(b"ustar  \0");
        let error = format(&tar).unwrap_err().to_string();
        assert!(error.contains("before PyTorch 0.1.10") && error.contains("weights_only=False"));
        tar[..8].copy_from_slice(b"data.txt");
        assert!(matches!(format(&tar), Err(Error::UnknownFormat { .. })));
    }
}
