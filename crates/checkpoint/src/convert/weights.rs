//! A model's weights, wherever they lie.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::FileTensor;
use crate::error::Error;
use crate::format::Format;
use crate::layout::{Checkpoint, Object, TensorLocation};
use crate::pth::PthFile;
use crate::safetensors::Header;
use crate::shards::Index;
use crate::value::Value;
use crate::wrapper_prefix;

/// Names and tensors of one model, in order.
pub type Weights = Vec<(String, FileTensor)>;

/// Reads the names of a weights file, of an index of several, or of a folder of either: safetensors, or
/// a state dictionary of `torch.save`. The prefixes of DistributedDataParallel and `torch.compile` are
/// taken off.
///
/// # Errors
/// What is wrong with the files; [`Error::UnknownFormat`] for a folder without weights.
pub fn read_weights(path: &Path) -> Result<Weights, Error> {
    let file = if path.is_dir() { in_folder(path)? } else { path.to_owned() };
    let mut weights = Vec::new();
    if file.extension().is_some_and(|extension| extension == "json") {
        for shard in Index::read(&file)?.files() {
            of_file(&file.with_file_name(shard), &mut weights)?;
        }
    } else {
        of_file(&file, &mut weights)?;
    }
    strip_wrapper(&mut weights);
    Ok(weights)
}

/// Takes off what PyTorch's wrappers put before every name.
pub(super) fn strip_wrapper(weights: &mut Weights) {
    let names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    let prefix = wrapper_prefix(&names, &[""; 0]);
    for (name, _) in weights {
        name.drain(..prefix.len());
    }
}

/// A checkpoint's model.
pub(super) fn of_object(checkpoint: &Checkpoint, model: &Object) -> Result<Weights, Error> {
    let places = checkpoint.tensors(model)?;
    let mut weights: Weights =
        places.into_iter().map(|(name, place)| (name, FileTensor::placed(place))).collect();
    weights.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(weights)
}

pub(super) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors") || NAMES.contains(&name)
}

fn in_folder(folder: &Path) -> Result<PathBuf, Error> {
    let found = NAMES.iter().map(|name| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| Error::UnknownFormat {
        path: folder.to_owned(),
        fact: format!("the folder holds none of {}", NAMES.join(", ")),
    })
}

fn of_file(path: &Path, weights: &mut Weights) -> Result<(), Error> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    match Format::of(path, &file)? {
        Format::Safetensors => {
            for entry in Header::read(path, &file)?.tensors {
                let place = TensorLocation {
                    path: path.to_owned(),
                    offset: entry.range.start,
                    info: entry.info,
                };
                weights.push((entry.name, FileTensor::placed(place)));
            }
        }
        Format::Pth => {
            let file = PthFile::open(path)?;
            let value = file.value()?;
            let file = Arc::new(Mutex::new(file));
            let refuse = |fact: String| Error::Unsupported { path: path.to_owned(), fact };
            let Value::Dict(entries) = value else {
                return Err(refuse(format!(
                    "it holds {}, not a state dictionary of a model",
                    value.describe()
                )));
            };
            for (key, value) in entries {
                match (key, value) {
                    (Value::Str(name), Value::Tensor(tensor)) => {
                        weights.push((name, FileTensor::stored(&file, tensor)));
                    }
                    (key, value) => {
                        return Err(refuse(format!(
                            "it holds {} under `{}`, not only tensors: save `model.state_dict()` \
                             alone, or bring all of it in with `brigade checkpoint convert --like`",
                            value.describe(),
                            key.as_str().unwrap_or("a key that is not a string"),
                        )));
                    }
                }
            }
        }
    }
    Ok(())
}

/// In the order in which they are looked for.
const NAMES: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];
