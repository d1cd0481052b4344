//! The files of `torch.save` since PyTorch 1.6: a zip archive of a pickle and of storages.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use tch::{Kind, Tensor};

use super::Fault;
use super::archive::Archive;
use super::pickle::{Pickle, Storage, TensorSpec, Value};
use super::safetensors::tensor;
use crate::{Error, StateDict};

/// The state dictionary of the file, or the one under the key `entry` at its top.
pub(super) fn load(
    path: &Path,
    file: File,
    length: u64,
    entry: Option<&str>,
) -> Result<StateDict, Error> {
    let at = |fault: Fault| fault.at(path);
    let archive = Archive::open(file, length).map_err(at)?;
    let mut storages = Storages::new(archive).map_err(at)?;
    let code = storages.read("data.pkl").map_err(at)?;
    let pickle = Pickle::read(&code).map_err(at)?;

    let chosen = choose(path, &pickle, entry)?;
    let specs = tensors(path, &pickle, chosen)?;
    let mut state = StateDict::new();
    for (name, spec) in specs {
        let view = storages.view(spec).map_err(|fault| about(fault, name)).map_err(at)?;
        state.insert(name, view)?;
    }
    Ok(state)
}

fn choose<'a>(path: &Path, pickle: &Pickle<'a>, entry: Option<&str>) -> Result<Value<'a>, Error> {
    let Some(entry) = entry else { return Ok(pickle.root()) };
    let top = pickle.dict(pickle.root()).unwrap_or_default();
    // The last of equal keys counts, as in Python.
    let chosen = top.iter().rev().find(|(key, _)| *key == Value::Str(entry));
    match chosen {
        Some((_, value)) if pickle.dict(*value).is_some() => Ok(*value),
        _ => Err(Error::NoSuchEntry {
            path: path.to_owned(),
            entry: entry.to_owned(),
            dictionaries: dictionaries(pickle, pickle.root()),
        }),
    }
}

/// Names and tensors of a dictionary that holds nothing else.
fn tensors<'p, 'a>(
    path: &Path,
    pickle: &'p Pickle<'a>,
    value: Value<'a>,
) -> Result<indexmap::IndexMap<&'a str, &'p TensorSpec<'a>>, Error> {
    let refuse = |found: String| Error::NotAStateDict {
        path: path.to_owned(),
        found,
        dictionaries: dictionaries(pickle, value),
    };
    let entries = pickle.dict(value).ok_or_else(|| refuse(pickle.describe(value).to_owned()))?;
    let entry = |(key, value): &(Value<'a>, Value<'a>)| match (key, pickle.tensor(*value)) {
        (Value::Str(name), Some(tensor)) => Ok((*name, tensor)),
        (Value::Str(name), None) => {
            Err(refuse(format!("{} under `{name}`", pickle.describe(*value))))
        }
        (key, _) => Err(refuse(format!("a dictionary with {} for a key", pickle.describe(*key)))),
    };
    entries.iter().map(entry).collect()
}

fn dictionaries(pickle: &Pickle<'_>, value: Value<'_>) -> Vec<String> {
    let entries = pickle.dict(value).unwrap_or_default().iter();
    entries
        .filter_map(|(key, value)| match key {
            Value::Str(name) => pickle.dict(*value).map(|_| (*name).to_owned()),
            _ => None,
        })
        .take(MAX_SHOWN)
        .collect()
}

/// The storages of an archive, each read once, when its first tensor is asked for.
struct Storages {
    archive: Archive,
    folder: String,
    read: HashMap<String, (Kind, Tensor)>,
}

impl Storages {
    fn new(mut archive: Archive) -> Result<Self, Fault> {
        let folder = archive.folder().to_owned();
        if archive.has(&format!("{folder}/constants.pkl")) {
            return Err(Fault::unsupported(
                "it is a TorchScript archive; load it in PyTorch and save its state_dict()",
            ));
        }
        if !archive.has(&format!("{folder}/data.pkl")) {
            return Err(Fault::unsupported("it is a zip archive, but not one of torch.save"));
        }
        let order = format!("{folder}/byteorder");
        if archive.has(&order) && archive.read(&order)? != b"little" {
            return Err(Fault::unsupported(
                "its bytes are in big-endian order; save it again on a little-endian machine",
            ));
        }
        Ok(Self { archive, folder, read: HashMap::new() })
    }

    fn read(&mut self, name: &str) -> Result<Vec<u8>, Fault> {
        self.archive.read(&format!("{}/{name}", self.folder))
    }

    fn view(&mut self, spec: &TensorSpec<'_>) -> Result<Tensor, Fault> {
        let storage = self.storage(spec.storage)?;
        check_bounds(spec)?;
        Ok(storage.f_as_strided(&spec.size[..], &spec.stride[..], spec.offset)?)
    }

    fn storage(&mut self, storage: Storage<'_>) -> Result<&Tensor, Fault> {
        let Storage { key, kind, numel } = storage;
        let name = format!("{}/data/{key}", self.folder);
        let bytes = self.archive.bytes(&name)?;
        let declared = u64::try_from(numel).ok();
        let declared = declared.and_then(|n| n.checked_mul(kind.elt_size_in_bytes() as u64));
        if declared != Some(bytes) {
            return Err(Fault::damaged(format_args!(
                "storage {key} is declared as {numel} elements of {kind:?} but has {bytes} bytes"
            )));
        }
        if !self.read.contains_key(key) {
            let mut content = self.archive.read(&name)?;
            let read = (kind, tensor(&mut content, &[numel], kind)?);
            self.read.insert(key.to_owned(), read);
        }
        match self.read.get(key) {
            Some((as_kind, tensor)) if *as_kind == kind => Ok(tensor),
            _ => Err(Fault::damaged(format_args!("storage {key} is used as two kinds"))),
        }
    }
}

/// Every element of the view lies in the storage.
fn check_bounds(spec: &TensorSpec<'_>) -> Result<(), Fault> {
    let TensorSpec { storage, offset, size, stride } = spec;
    let outside = || {
        Fault::damaged(format_args!(
            "size {size:?}, stride {stride:?} and offset {offset} reach outside its storage of {} \
             elements",
            storage.numel
        ))
    };
    let negative = size.iter().chain(stride).chain([offset]).any(|&number| number < 0);
    let numel = size.iter().try_fold(1i64, |product, &size| product.checked_mul(size.max(1)));
    if negative || size.len() != stride.len() || size.len() > MAX_DIMENSIONS || numel.is_none() {
        return Err(outside());
    }
    if size.contains(&0) {
        return if *offset <= storage.numel { Ok(()) } else { Err(outside()) };
    }
    let last = size.iter().zip(stride).try_fold(*offset, |last, (&size, &stride)| {
        (size - 1).checked_mul(stride).and_then(|step| last.checked_add(step))
    });
    if last.is_some_and(|last| last < storage.numel) { Ok(()) } else { Err(outside()) }
}

fn about(fault: Fault, name: &str) -> Fault {
    match fault {
        Fault::Damaged(fact) => Fault::Damaged(format!("`{name}`: {fact}")),
        other => other,
    }
}

/// Of the keys that a message lists.
const MAX_SHOWN: usize = 20;
/// More than any tensor of a model has; some of libtorch's loops are exponential in them.
const MAX_DIMENSIONS: usize = 32;
