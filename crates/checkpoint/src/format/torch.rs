//! The formats of `torch.save`: zip archives, and the streams before them.

use std::fs::File;
use std::path::Path;

use super::{OpenWeights, WeightsFormat, format_of};
use crate::error::Error;
use crate::file_handle::open_regular;
use crate::file_tensor::{FileTensor, Weights};
use crate::pth::{self, PthFile, begins_legacy};
use crate::value::Value;

/// Files of `torch.save`, `torch.jit.save` and `torch.export.save`, see [`crate::pth`]. Writes a single state
/// dictionary, as `torch.save` does.
#[derive(Debug, Clone, Copy)]
pub struct Torch;

impl WeightsFormat for Torch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn description(&self) -> &'static str {
        "file of torch.save"
    }

    fn written(&self) -> &'static str {
        "One state dictionary for torch.load"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["pth", "pt", "bin"]
    }

    fn begins(&self, start: &[u8]) -> bool {
        start.starts_with(ZIP_MAGIC) || begins_legacy(start)
    }

    fn open(&self, path: &Path, file: File, key: Option<&str>) -> Result<OpenWeights, Error> {
        let file = PthFile::from_file(path, file)?;
        let state = file.state_dict(key)?;
        Ok(OpenWeights::Storages(Box::new(file), state))
    }

    fn write(&self, path: &Path, weights: &Weights) -> Result<(), Error> {
        for (name, tensor) in weights {
            if let Some(fact) = pth::refusal(tensor) {
                let (path, fact) = (path.to_owned(), format!("`{name}`: {fact}"));
                return Err(Error::Unsupported { path, fact });
            }
        }
        write_pth(path, &state_dict(weights.clone()))
    }
}

impl PthFile {
    /// Opens a file and reads its directory, but no tensor.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], [`Error::UnknownFormat`] or [`Error::Damaged`], or with [`Error::Unsupported`] for
    /// archives that PyTorch has not written, for the tar archives of PyTorch before 0.1.10, and for safetensors files.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let file = open_regular(path).map_err(Error::io("read", path))?;
        let format = format_of(path, &file)?;
        if format.name() != Torch.name() {
            return Err(Error::Unsupported {
                path: path.to_owned(),
                fact: format!(
                    "it is a {}, and a file of torch.save is expected here",
                    format.description()
                ),
            });
        }
        Self::from_file(path, file)
    }
}

fn state_dict(weights: Weights) -> Value<FileTensor> {
    Value::dict(weights.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor))))
}

/// Writes a value to a new file, as `torch.save` does.
pub(crate) fn write_pth(path: &Path, value: &Value<FileTensor>) -> Result<(), Error> {
    let write = || -> std::io::Result<()> {
        let file = File::create_new(path)?;
        let mut out = std::io::BufWriter::with_capacity(1 << 20, &file);
        pth::write(&mut out, value)?;
        drop(out);
        file.sync_all()
    };
    write().map_err(Error::io("write", path))
}

const ZIP_MAGIC: &[u8] = b"PK\x03\x04";
