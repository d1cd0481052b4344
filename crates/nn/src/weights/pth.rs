//! Reading of `torch.save`'s state dictionaries.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use brigade_checkpoint::pth::{
    self, PthFile, StorageKey, StoredStateDict, StoredTensor, TensorData,
};
use brigade_checkpoint::{Dtype, Error as FileError, TensorInfo, Value};
use brigade_torch::{Error, bytes, dtype_of, loaded_kind, tensor_from_bytes};
use tch::{Device, Tensor};

use super::damaged;
use super::safetensors::{CHUNK_BYTES, write_whole};
use crate::StateDict;
use crate::error::ModelError;

/// Loads a state dictionary of a file.
pub(super) fn load(
    path: &Path,
    mut file: PthFile,
    found: StoredStateDict,
) -> Result<StateDict, Error> {
    let mut storages = HashMap::new();
    let mut state = StateDict::under(found.key);
    for (name, spec) in found.tensors {
        check_kind(path, &name, &spec)?;
        let view = view(&mut file, &mut storages, &spec).map_err(|error| about(error, &name))?;
        state.insert(name, view)?;
    }
    Ok(state)
}

fn check_kind(path: &Path, name: &str, spec: &StoredTensor) -> Result<(), Error> {
    let kind = loaded_kind(name, spec.storage.dtype);
    kind.map(drop).map_err(|fact| super::unsupported(path, fact))
}

/// Tensor of a state dictionary, as it is stored.
struct Stored<'t> {
    dtype: Dtype,
    tensor: &'t Tensor,
}

impl TensorData for Stored<'_> {
    fn info(&self) -> TensorInfo {
        let shape = self.tensor.size().iter().map(|size| size.unsigned_abs()).collect();
        TensorInfo { dtype: self.dtype, shape }
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let plain = self.tensor.f_to_device(Device::Cpu).and_then(|tensor| tensor.f_contiguous());
        let plain = plain.map_err(io::Error::other)?;
        bytes(&plain)
            .map_err(io::Error::other)?
            .try_chunks(CHUNK_BYTES, |chunk| out.write_all(chunk))
    }
}

pub(super) fn save(state: &StateDict, path: &Path) -> Result<(), Error> {
    let mut entries = Vec::with_capacity(state.len());
    for (name, tensor) in state.iter() {
        let kind =
            tensor.f_kind().map_err(ModelError::torch(format!("read the kind of {name}")))?;
        let dtype = dtype_of(kind).ok_or_else(|| FileError::Unsupported {
            path: path.to_owned(),
            fact: format!("a .pth file cannot hold `{name}` of {kind:?}"),
        })?;
        entries.push((name, Value::Tensor(Stored { dtype, tensor })));
    }
    let value = Value::dict(entries);
    write_whole(path, |out| {
        let mut buffered = BufWriter::new(*out);
        pth::write(&mut buffered, &value)?;
        buffered.flush()
    })
    .map_err(|source| super::io("write", path, source))
}

/// Returns a tensor as a view of its storage, which is read at the first tensor that uses it.
fn view(
    file: &mut PthFile,
    storages: &mut HashMap<String, (StorageKey, Tensor)>,
    spec: &StoredTensor,
) -> Result<Tensor, Error> {
    let damaged = |file: &PthFile, fact: String| damaged(file.path(), fact);
    let StoredTensor { storage, offset, size, stride, .. } = spec;
    if !storages.contains_key(&storage.key) {
        let mut bytes = file.storage(storage)?;
        let read = tensor_from_bytes(&mut bytes, &[storage.elements], storage.dtype)
            .map_err(|error| damaged(file, format!("libtorch refuses a tensor of it: {error}")))?;
        storages.insert(storage.key.clone(), (storage.clone(), read));
    }
    let read = match storages.get(&storage.key) {
        Some((known, tensor)) if known == storage => tensor,
        Some((known, _)) if known.dtype == storage.dtype => {
            let (declared, found) = (storage.elements, known.elements);
            let fact = format!(
                "storage {} is declared as {declared} elements of {} but has {found}",
                storage.key, storage.dtype
            );
            return Err(damaged(file, fact));
        }
        _ => return Err(damaged(file, format!("storage {} is used as two kinds", storage.key))),
    };
    spec.check_bounds(file.path())?;
    read.f_as_strided(&size[..], &stride[..], *offset)
        .map_err(|error| damaged(file, format!("libtorch refuses a tensor of it: {error}")))
}

fn about(error: Error, name: &str) -> Error {
    match error.downcast() {
        Ok(FileError::Damaged { path, fact }) => damaged(&path, format!("`{name}`: {fact}")),
        Ok(other) => other.into(),
        Err(other) => other,
    }
}
