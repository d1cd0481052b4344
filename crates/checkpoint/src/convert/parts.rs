//! Writing of weights into several files with an index.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::error::Error;
use crate::file_name::FileName;
use crate::file_tensor::Weights;
use crate::format::{Safetensors, WeightsFormat};
use crate::pth::TensorData;
use crate::shards::{self, Index, IndexMetadata};

/// Writes weights into a folder, in files of at most `max_bytes` bytes, with an index if there are several.
pub(super) fn write(folder: &Path, weights: &Weights, max_bytes: u64) -> Result<(), Error> {
    let stem = FileName::new("model")
        .map_err(|error| Error::Unsupported { path: folder.to_owned(), fact: error.to_string() })?;
    let sizes: Vec<u64> =
        weights.iter().map(|(_, tensor)| tensor.info().bytes().unwrap_or(u64::MAX)).collect();
    let mut parts = shards::cut(&sizes, max_bytes);
    if parts.is_empty() {
        parts.push(Vec::new());
    }
    let total_size = sizes.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
    let mut index = Index { metadata: IndexMetadata { total_size }, weight_map: BTreeMap::new() };
    for (number, part) in parts.iter().enumerate() {
        let file = shards::file_name(&stem, number, parts.len());
        let of_file: Weights = part.iter().map(|&place| weights[place].clone()).collect();
        for (name, _) in &of_file {
            index.weight_map.insert(name.clone(), file.clone());
        }
        Safetensors.write(&folder.join(&*file), &of_file)?;
    }
    if parts.len() > 1 {
        let file = folder.join(&*shards::index_name(&stem));
        fs::write(&file, index.to_json()).map_err(Error::io("write", &file))?;
    }
    Ok(())
}
