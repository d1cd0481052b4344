//! Formats of weights files, with their operations.

mod safetensors;
mod torch;

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use safetensors::Safetensors;
pub(crate) use safetensors::write_safetensors;
pub use torch::Torch;
pub(crate) use torch::write_pth;

use crate::error::Error;
use crate::file_handle::FileHandle;
use crate::file_tensor::Weights;
use crate::other_format::{START_BYTES, describe};
use crate::pth::{PthFile, StoredStateDict};
use crate::safetensors::Entry;

/// All formats, in the order in which they are tried on a file's first bytes.
pub static FORMATS: &[&dyn WeightsFormat] = &[&Torch, &Safetensors];

/// A format of weights files: how to recognize, read and write it.
///
/// ```
/// use brigade_checkpoint::{FORMATS, format_named};
///
/// let names: Vec<_> = FORMATS.iter().map(|format| format.name()).collect();
/// assert_eq!(names, ["torch", "safetensors"]);
/// assert_eq!(format_named("pt".as_ref()).map(|format| format.name()), Some("torch"));
/// ```
pub trait WeightsFormat: fmt::Debug + Send + Sync {
    /// Returns the name of the format, as passed to `brigade checkpoint convert --to`.
    fn name(&self) -> &'static str;

    /// Returns a noun for files of the format, for messages, such as "file of torch.save".
    fn description(&self) -> &'static str;

    /// Returns a description of the output of [`write`](Self::write), for the help of `--to`.
    fn written(&self) -> &'static str;

    /// Returns the file extensions that select this format for writing, without dots.
    fn extensions(&self) -> &'static [&'static str];

    /// Returns `true` if a file that begins with these bytes has this format. `start` is the whole file or its first
    /// 512 bytes.
    fn begins(&self, start: &[u8]) -> bool;

    /// Opens a file and reads names, types, shapes and places of its tensors, without their elements. `key` selects one
    /// of several state dictionaries.
    ///
    /// # Errors
    /// Fails if the file is damaged or unsupported, with [`Error::NoSuchKey`] also for formats without keys, or with
    /// [`Error::NoStateDict`] or [`Error::SeveralStateDicts`].
    fn open(&self, path: &Path, file: File, key: Option<&str>) -> Result<OpenWeights, Error>;

    /// Reads the metadata that the user has stored in a file besides the tensors. Defaults to an empty map.
    ///
    /// # Errors
    /// Fails if the file is damaged or unsupported.
    fn metadata(&self, path: &Path, file: &File) -> Result<HashMap<String, String>, Error> {
        let _ = (path, file);
        Ok(HashMap::new())
    }

    /// Writes tensors to a new file, copied in pieces. By default fails, for read-only formats.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], or with [`Error::Unsupported`] if the format cannot be written or cannot store a
    /// tensor.
    fn write(&self, path: &Path, weights: &Weights) -> Result<(), Error> {
        let _ = weights;
        let fact = format!("a {} cannot be written; give another format", self.description());
        Err(Error::Unsupported { path: path.to_owned(), fact })
    }
}

/// An open weights file, whose tensors can be read one at a time.
#[derive(Debug)]
pub enum OpenWeights {
    /// Tensors as byte ranges of the file, contiguous and little-endian.
    Ranges(FileHandle, Vec<Entry>),
    /// Tensors as views of storages, which several may share.
    Storages(Box<PthFile>, StoredStateDict),
}

impl OpenWeights {
    /// Returns the names of the tensors, in the order of the file.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Ranges(_, entries) => entries.iter().map(|entry| entry.name.as_str()).collect(),
            Self::Storages(_, found) => {
                found.tensors.iter().map(|(name, _)| name.as_str()).collect()
            }
        }
    }

    /// Returns the key of the state dictionary in the file. Empty if it is the whole file.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Ranges(..) => "",
            Self::Storages(_, found) => &found.key,
        }
    }
}

/// Returns the format of an open file, from its first bytes and not from its name. The file must be at its beginning.
///
/// # Errors
/// Fails with [`Error::Io`], with [`Error::UnknownFormat`], or with [`Error::Unsupported`] for the tar archives of
/// PyTorch before 0.1.10.
pub fn format_of(path: &Path, file: &File) -> Result<&'static dyn WeightsFormat, Error> {
    let mut start = Vec::with_capacity(START_BYTES);
    let mut reader = file.take(START_BYTES as u64);
    reader.read_to_end(&mut start).map_err(Error::io("read", path))?;
    if begins_tar(&start) {
        return Err(Error::Unsupported { path: path.to_owned(), fact: TAR.into() });
    }
    if let Some(format) = FORMATS.iter().find(|format| format.begins(&start)) {
        return Ok(*format);
    }
    let fact = if start.first() == Some(&PICKLE_PROTOCOL) {
        "it is a pickle, but not one that torch.save has written".to_owned()
    } else {
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        describe(&start, length)
    };
    Err(Error::UnknownFormat { path: path.to_owned(), fact })
}

/// Returns the format to write for a file extension without dot. `None` for other extensions.
#[must_use]
pub fn format_named(extension: &std::ffi::OsStr) -> Option<&'static dyn WeightsFormat> {
    let extension = extension.to_str()?;
    FORMATS.iter().find(|format| format.extensions().contains(&extension)).copied()
}

/// Returns `true` for the format before PyTorch 0.1.10: a tar archive whose first entry has one of four names.
fn begins_tar(start: &[u8]) -> bool {
    let name = start.split(|&byte| byte == 0).next().unwrap_or_default();
    start.get(257..262) == Some(b"ustar") && TAR_ENTRIES.contains(&name)
}

const TAR_ENTRIES: [&[u8]; 4] = [b"sys_info", b"pickle", b"tensors", b"storages"];
/// First byte of a pickle.
const PICKLE_PROTOCOL: u8 = 0x80;
const TAR: &str = "it is in the tar format of torch.save before PyTorch 0.1.10, which only PyTorch reads; \
                   if you trust it, load it there with `torch.load(path, weights_only=False)`, and \
                   `torch.save` its state dictionary again";

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;
    use crate::file_tensor::FileTensor;
    use crate::torch_optimizer::StateTensor;

    fn format(start: &[u8]) -> Result<&'static str, Error> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(start).unwrap();
        file.rewind().unwrap();
        Ok(format_of(Path::new("file"), &file)?.name())
    }

    #[test]
    fn a_header_of_any_length_is_safetensors() {
        for length in (0..4096u64).step_by(8) {
            let mut start = length.to_le_bytes().to_vec();
            start.extend(b"{\"__metadata__\"");
            assert!(matches!(format(&start), Ok("safetensors")), "{length}");
        }
    }

    #[test]
    fn pickles_without_a_zip_archive_are_told_apart() {
        // torch.save's magic number, in protocols 2 and 4.
        let magic = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
        for start in [&b"\x80\x02"[..], b"\x80\x04\x95\x0d\0\0\0\0\0\0\0"] {
            assert!(matches!(format(&[start, magic].concat()), Ok("torch")), "{start:?}");
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

    #[test]
    fn what_a_format_writes_it_recognizes_and_opens() {
        let folder = tempfile::tempdir().unwrap();
        let weights = vec![("layer.weight".to_owned(), FileTensor::from_scalar(0.5))];
        for format in FORMATS {
            let path = folder.path().join(format.name());
            format.write(&path, &weights).unwrap();
            let file = File::open(&path).unwrap();
            assert_eq!(format_of(&path, &file).unwrap().name(), format.name());
            let weights = format.open(&path, file, None).unwrap();
            assert_eq!(weights.names(), ["layer.weight"], "{}", format.name());
            for extension in format.extensions() {
                assert_eq!(format_named(extension.as_ref()).unwrap().name(), format.name());
            }
        }
        assert!(format_named("npz".as_ref()).is_none());
    }
}
