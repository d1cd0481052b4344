//! The safetensors format, as a [`WeightsFormat`].

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use super::{OpenWeights, PICKLE_PROTOCOL, WeightsFormat};
use crate::error::Error;
use crate::file_tensor::Weights;
use crate::layout::{ChecksumWriter, FileFacts};
use crate::pth::TensorData;
use crate::safetensors::{Header, layout};

/// Hugging Face's safetensors format, see [`crate::safetensors`].
#[derive(Debug, Clone, Copy)]
pub struct Safetensors;

impl WeightsFormat for Safetensors {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn description(&self) -> &'static str {
        "safetensors file"
    }

    fn written(&self) -> &'static str {
        "One safetensors file of weights"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["safetensors"]
    }

    /// Recognizes the header after its length, whose lowest byte can have any value.
    fn begins(&self, start: &[u8]) -> bool {
        let header_begins = start.get(8) == Some(&b'{');
        let is_length = start.get(4..8) == Some(&[0; 4]);
        let is_pickle = start.first() == Some(&PICKLE_PROTOCOL);
        let is_text =
            start.iter().take(8).all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
        header_begins && (is_length || !is_pickle && !is_text)
    }

    fn open(&self, path: &Path, file: File, key: Option<&str>) -> Result<OpenWeights, Error> {
        if let Some(key) = key {
            // The format has no keys, only tensor names.
            let (path, key, keys) = (path.to_owned(), key.to_owned(), vec![String::new()]);
            return Err(Error::NoSuchKey { path, key, keys });
        }
        let header = Header::read(path, &file)?;
        Ok(OpenWeights::Ranges(file.into(), header.tensors))
    }

    fn metadata(&self, path: &Path, file: &File) -> Result<HashMap<String, String>, Error> {
        Ok(Header::read(path, file)?.metadata)
    }

    fn write(&self, path: &Path, weights: &Weights) -> Result<(), Error> {
        write_safetensors(path, weights).map(drop)
    }
}

/// Writes tensors to a new file, copied in pieces.
pub(crate) fn write_safetensors(path: &Path, weights: &Weights) -> Result<FileFacts, Error> {
    let infos: Vec<_> =
        weights.iter().map(|(name, tensor)| (name.as_str(), tensor.info())).collect();
    let layout = layout(path, &infos)?;
    let mut out = ChecksumWriter::create_sized(path, layout.bytes, true)?;
    out.put(&layout.header)?;
    for place in layout.order {
        weights[place].1.write_to(&mut out).map_err(Error::io("write", path))?;
    }
    out.finish(true)
}
