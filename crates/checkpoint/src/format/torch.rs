//! `torch.save`, in zip archives and before.

use std::fs::File;
use std::path::Path;

use super::{OpenWeights, WeightsFormat};
use crate::convert::{Weights, state_dict, write_pth};
use crate::error::Error;
use crate::pth::{self, PthFile};

/// The files of `torch.save`, `torch.jit.save` and `torch.export.save`, see [`crate::pth`]. Written is one state
/// dictionary, as `torch.save` writes it.
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

/// Whether a file that begins with these bytes is in the format before zip archives. 262 are enough to tell.
pub(crate) fn begins_legacy(start: &[u8]) -> bool {
    let Some(([0x80, _protocol], rest)) = start.split_at_checked(2) else { return false };
    // The length of a frame, which protocols 4 and 5 have.
    let rest = if rest.first() == Some(&0x95) { rest.get(9..).unwrap_or_default() } else { rest };
    rest.starts_with(MAGIC)
}

/// LONG1 of 0x1950a86a20f9469cfc6c, and STOP.
const MAGIC: &[u8] = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";
