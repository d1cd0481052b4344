//! Weights in folders of `torch.distributed.checkpoint` (DCP), as PyTorch's FSDP and Accelerate save them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::dtype::TensorInfo;
use crate::error::Error;
use crate::fault::Fault;
use crate::file_name::FileName;
use crate::file_tensor::{FileTensor, Weights};
use crate::layout::TensorLocation;
use crate::pth::{DcpMetadata, DcpPlace, DcpTensor, PthFile, dcp_metadata, shown};
use crate::region::Region;
use crate::value::Value;

/// The file whose presence says that a folder is complete.
const METADATA: &str = ".metadata";
/// What Accelerate calls the folder of a model, before its number.
const OF_ACCELERATE: &str = "pytorch_model_fsdp_";
/// The key of the model in the dictionary that most programs save.
const MODEL: &str = "model";

/// Weights of a folder, and how they were found.
pub(crate) struct DcpWeights {
    pub(crate) tensors: Weights,
    /// The key of the weights among the dictionaries that were saved; empty where they are all of it.
    pub(crate) key: String,
    /// What was read, in a line.
    pub(crate) read: String,
    pub(crate) left_out: Vec<String>,
}

/// Returns the folder of `torch.distributed.checkpoint` with a model: the folder itself, or the only one of a model in a
/// folder of Accelerate's `save_state` with FSDP. `None` where there is none.
///
/// # Errors
/// [`Error::Unsupported`] for a folder of Accelerate with several models.
pub fn dcp_folder(folder: &Path) -> Result<Option<PathBuf>, Error> {
    if folder.join(METADATA).is_file() {
        return Ok(Some(folder.to_owned()));
    }
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut models: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(OF_ACCELERATE))
        .map(|entry| entry.path())
        .filter(|path| path.join(METADATA).is_file())
        .collect();
    models.sort();
    if models.len() < 2 {
        return Ok(models.pop());
    }
    let names: Vec<String> = models.iter().map(|it| shown(&it.display().to_string())).collect();
    let fact = format!("it has several models: give one of {}", names.join(", "));
    Err(Error::Unsupported { path: folder.to_owned(), fact })
}

/// Finds the weights of a folder with DCP's metadata. No pickle is executed. `key` is that of the weights among the
/// dictionaries that were saved; by default `model`, or the only one.
///
/// # Errors
/// [`Error::Damaged`] and [`Error::Unsupported`] with the file that is not what the metadata say; [`Error::Io`] for one that
/// is missing; [`Error::NoSuchKey`], [`Error::SeveralStateDicts`].
pub(crate) fn dcp_weights(folder: &Path, key: Option<&str>) -> Result<DcpWeights, Error> {
    let path = folder.join(METADATA);
    let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
    let metadata = dcp_metadata(&path, &bytes)?;
    let top = |name: &str| match metadata.keys.get(name).map(Vec::as_slice) {
        Some([first, _, ..]) => first.clone(),
        _ => String::new(),
    };
    let tops: BTreeSet<String> = metadata.tensors.keys().map(|name| top(name)).collect();
    let key = chosen(&path, &tops, key)?;
    let places: BTreeMap<(&str, &[u64]), &DcpPlace> = metadata
        .places
        .iter()
        .filter_map(|place| Some(((place.name.as_str(), place.offset.as_deref()?), place)))
        .collect();
    let mut tensors = Weights::new();
    let (mut count, mut files) = (0, BTreeSet::new());
    for (name, tensor) in metadata.tensors.iter().filter(|(name, _)| top(name) == key) {
        let about = |fact: String| format!("`{}`: {fact}", shown(name));
        let mut parts = Vec::new();
        for region in tensor.chunks.iter().filter(|region| region.elements() > 0) {
            let missing = || Error::Damaged {
                path: path.clone(),
                fact: about(format!("it does not say where the part {region} lies")),
            };
            let place =
                places.get(&(name.as_str(), region.offset.as_slice())).ok_or_else(missing)?;
            parts.push((region.clone(), located(folder, place, tensor, region)?));
            files.insert(place.file.as_str());
            count += 1;
        }
        covers(tensor, &parts)
            .map_err(|fact| Error::Damaged { path: path.clone(), fact: about(fact) })?;
        let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone() };
        let joined = FileTensor::of_rows(info, parts)
            .map_err(|fact| Error::Unsupported { path: path.clone(), fact: about(fact) })?;
        tensors.push((inner_name(&metadata, name), joined));
    }
    let read = format!(
        "a checkpoint of torch.distributed.checkpoint: {} tensors in {count} parts in {} files",
        tensors.len(),
        files.len()
    );
    let others = tops.iter().filter(|top| **top != key);
    let left_out = others
        .map(|top| format!("{}: a weights file holds one model and nothing else", shown(top)))
        .collect();
    Ok(DcpWeights { tensors, key, read, left_out })
}

/// The key of the weights among those of the outermost dictionary; empty for tensors that lie in it themselves.
fn chosen(path: &Path, tops: &BTreeSet<String>, key: Option<&str>) -> Result<String, Error> {
    let keys = || tops.iter().cloned().collect::<Vec<_>>();
    match key {
        Some(key) if tops.contains(key) => Ok(key.to_owned()),
        Some(key) => {
            Err(Error::NoSuchKey { path: path.to_owned(), key: key.to_owned(), keys: keys() })
        }
        None if tops.contains(MODEL) => Ok(MODEL.to_owned()),
        None if tops.len() <= 1 => Ok(tops.first().cloned().unwrap_or_default()),
        None => Err(Error::SeveralStateDicts { path: path.to_owned(), keys: keys() }),
    }
}

/// A tensor's name in its state dictionary.
fn inner_name(metadata: &DcpMetadata, name: &str) -> String {
    match metadata.keys.get(name).map(Vec::as_slice) {
        Some([_, rest @ ..]) if !rest.is_empty() => rest.join("."),
        _ => name.to_owned(),
    }
}

/// Finds a part of a tensor in its file: an archive of `torch.save` with one tensor.
fn located(
    folder: &Path,
    place: &DcpPlace,
    tensor: &DcpTensor,
    region: &Region,
) -> Result<TensorLocation, Error> {
    let name = FileName::new(place.file.as_str()).map_err(|error| Error::Damaged {
        path: folder.join(METADATA),
        fact: format!("{}: {error}", shown(&place.file)),
    })?;
    let path = folder.join(&*name);
    let file = File::open(&path).map_err(Error::io("read", &path))?;
    let read = || -> Result<TensorLocation, Fault> {
        let about = |fact: String| format!("`{}` at {region}: {fact}", shown(&place.name));
        let bytes = file.metadata()?.len();
        if place.start.checked_add(place.length).is_none_or(|end| end > bytes) {
            let (length, start) = (place.length, place.start);
            let fact = format!("its {length} bytes at {start} are not in a file of {bytes}");
            return Err(Fault::damaged(about(fact)));
        }
        let saved = PthFile::from_range(&path, &file, place.start, place.length)?;
        let found = match saved.value().map_err(|error| Fault::damaged(about(error.to_string())))? {
            Value::Tensor(found) => found,
            other => {
                let fact = format!("expected a tensor, found {}", other.describe());
                return Err(Fault::damaged(about(fact)));
            }
        };
        let info = TensorInfo { dtype: tensor.dtype, shape: region.shape.clone() };
        if found.info() != info {
            let fact = format!("expected {info}, found {}", found.info());
            return Err(Fault::damaged(about(fact)));
        }
        let mut next = 1;
        for (&size, &stride) in found.size.iter().zip(&found.stride).rev() {
            if size != 1 && stride != next {
                let fact =
                    format!("its strides are {:?}: only rows in order are read", found.stride);
                return Err(Fault::unsupported(about(fact)));
            }
            next *= size.max(1);
        }
        let storage = saved.place(&found.storage.key)?;
        let offset = storage.begin + found.offset.unsigned_abs() * tensor.dtype.bytes();
        Ok(TensorLocation { path: path.clone(), offset, info })
    };
    read().map_err(|fault| fault.at(&path))
}

/// Whether parts are all of a tensor, each once.
fn covers(tensor: &DcpTensor, parts: &[(Region, TensorLocation)]) -> Result<(), String> {
    let all = Region::whole(&tensor.shape).elements();
    let found: u64 = parts.iter().map(|(region, _)| region.elements()).sum();
    let mut rows: Vec<(u64, u64)> = parts
        .iter()
        .filter_map(|(region, _)| Some((*region.offset.first()?, *region.shape.first()?)))
        .collect();
    rows.sort_unstable();
    // What joins parts refuses those that are cut along other dimensions.
    let by_rows = parts.iter().all(|(it, _)| it.shape.get(1..) == tensor.shape.get(1..));
    let overlap = by_rows && rows.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0);
    if found != all || overlap {
        return Err(format!("its parts have {found} elements of {all}, or overlap"));
    }
    Ok(())
}
