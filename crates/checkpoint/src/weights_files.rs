//! Search for weights: in a file, in the parts of an index, in files of one tensor each, or in a folder of these.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::file_handle::open_regular;
use crate::file_name::FileName;
use crate::format::{OpenWeights, format_of};
use crate::offload_folder;
use crate::pth::shown;
use crate::shards::Index;

/// An open weights file.
#[derive(Debug)]
pub struct WeightsFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Tensors of the file.
    pub weights: OpenWeights,
}

/// Opens weights: a safetensors file, a file of `torch.save`, an index of several (`model.safetensors.index.json`), the
/// `index.json` of a folder into which Accelerate has offloaded weights, or a folder with one of these, as found by
/// [`weights_file`]. No tensor is read.
///
/// ```
/// use brigade_checkpoint::open_weights;
///
/// let files = open_weights("tests/fixtures/weights/kinds_protocol_4.pth".as_ref(), None)?;
/// assert_eq!(files.len(), 1);
/// assert!(files[0].weights.names().contains(&"base"));
/// # Ok::<(), brigade_checkpoint::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`format_of`] and [`WeightsFormat::open`](crate::WeightsFormat::open),
/// [`Error::UnknownFormat`] for a folder without weights, and [`Error::Damaged`] if the parts do not match their index.
pub fn open_weights(place: &Path, key: Option<&str>) -> Result<Vec<WeightsFile>, Error> {
    let file = if place.is_dir() { in_folder(place)? } else { place.to_owned() };
    if file.file_name().is_some_and(|name| name == offload_folder::INDEX) {
        match key {
            None => {
                let files = offload_folder::open(&file)?.into_iter();
                Ok(files.map(|(path, weights)| WeightsFile { path, weights }).collect())
            }
            // The format has no keys, only tensor names.
            Some(key) => {
                let (key, keys) = (key.to_owned(), vec![String::new()]);
                Err(Error::NoSuchKey { path: file, key, keys })
            }
        }
    } else if file.extension().is_some_and(|extension| extension == "json") {
        open_parts(&file, key)
    } else {
        Ok(vec![open_file(file, key)?])
    }
}

/// Returns the weights file of a folder, or the index of several: `model.safetensors`, `pytorch_model.bin` and the
/// like. `None` if there is none.
#[must_use]
pub fn weights_file(folder: &Path) -> Option<PathBuf> {
    NAMES.iter().map(|name| folder.join(name)).find(|file| file.is_file())
}

/// Returns `true` if a file of this name contains weights or their index.
pub(crate) fn is_weights(name: &str) -> bool {
    let is_part = name.starts_with("pytorch_model-") && name.ends_with(".bin");
    name.ends_with(".safetensors") || is_part || NAMES.contains(&name)
}

fn in_folder(folder: &Path) -> Result<PathBuf, Error> {
    weights_file(folder).ok_or_else(|| Error::UnknownFormat {
        path: folder.to_owned(),
        fact: format!("the folder holds none of {}", NAMES.join(", ")),
    })
}

fn open_file(path: PathBuf, key: Option<&str>) -> Result<WeightsFile, Error> {
    let file = open_regular(&path).map_err(Error::io("read", &path))?;
    let weights = format_of(&path, &file)?.open(&path, file, key)?;
    Ok(WeightsFile { path, weights })
}

/// Opens the parts of an index, and checks that they match it and contain each tensor once.
fn open_parts(path: &Path, key: Option<&str>) -> Result<Vec<WeightsFile>, Error> {
    let index = Index::read(path)?;
    let damaged = |fact: String| Error::Damaged { path: path.to_owned(), fact };
    let mut holders: HashMap<String, &FileName> = HashMap::new();
    let mut files: Vec<WeightsFile> = Vec::new();
    for part in index.files() {
        let opened = open_file(path.with_file_name(part), key)?;
        if let Some(first) = files.first()
            && first.weights.key() != opened.weights.key()
        {
            return Err(damaged(format!(
                "the state dictionary of {} is under the key `{}`, that of {part} under `{}`",
                first.path.file_name().unwrap_or_default().display(),
                shown(first.weights.key()),
                shown(opened.weights.key())
            )));
        }
        for name in opened.weights.names() {
            if let Some(other) = holders.insert(name.to_owned(), part) {
                let name = shown(name);
                return Err(damaged(format!("`{name}` is in two shards, {other} and {part}")));
            }
        }
        files.push(opened);
    }
    match index.weight_map.iter().find(|(name, part)| holders.get(*name) != Some(part)) {
        Some((name, part)) => {
            Err(damaged(format!("`{}` is not in {part}, where it is to be", shown(name))))
        }
        None => Ok(files),
    }
}

/// Names of weights files and indexes, in the order of lookup.
const NAMES: [&str; 7] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
    offload_folder::INDEX,
];
