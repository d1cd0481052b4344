//! Files of values and tensors: dictionaries that `torch.load(weights_only=True)` reads.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use brigade_checkpoint::pth::{self, PthFile, StoredTensor, TensorData};
use brigade_checkpoint::{Dtype, TensorInfo, Value};
use brigade_torch::{Error, Result, bytes, dtype_of, tensor_from_bytes};
use tch::{Device, Tensor};

use crate::error::LearnError;

/// A tensor as it is stored in a file, in memory.
struct Stored {
    dtype: Dtype,
    tensor: Tensor,
}

impl TensorData for Stored {
    fn info(&self) -> TensorInfo {
        let shape = self.tensor.size().iter().map(|size| size.unsigned_abs()).collect();
        TensorInfo { dtype: self.dtype, shape }
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let bytes = bytes(&self.tensor).map_err(io::Error::other)?;
        out.write_all(&bytes.to_vec())
    }
}

fn stored(value: Value<Tensor>) -> Result<Value<Stored>> {
    value.try_map(&mut |name, tensor| {
        let dtype = dtype_of(tensor.kind()).ok_or_else(|| {
            Error::invalid_argument(format!(
                "`{name}` cannot be written: its tensor is of {:?}",
                tensor.kind()
            ))
        })?;
        let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        Ok::<_, Error>(Stored { dtype, tensor })
    })
}

/// Writes a value to a file atomically.
pub(crate) fn write(path: &Path, value: Value<Tensor>) -> Result<()> {
    let stored = stored(value)?;
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder)
            .map_err(LearnError::file("cannot make the folder", folder))?;
    }
    let part = beside(path);
    let written = File::create(&part).and_then(|file| {
        let mut out = BufWriter::new(file);
        pth::write(&mut out, &stored)?;
        let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        std::fs::rename(&part, path)
    });
    Ok(written.map_err(|source| {
        let _ = std::fs::remove_file(&part);
        LearnError::file("cannot write", path)(source)
    })?)
}

/// Returns the name of the file while it is being written.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

/// Reads a saved value, or the tensors of a safetensors file, on the CPU. Executes no code of the file.
pub(crate) fn read(path: &Path) -> Result<Value<Tensor>> {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        let state = brigade_nn::weights::load(path)?;
        let tensors = state.iter().map(|(name, it)| (name, Value::Tensor(it.shallow_clone())));
        return Ok(Value::dict(tensors));
    }
    let fault = |error: brigade_checkpoint::Error| LearnError::Format {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let mut file = PthFile::open(path).map_err(fault)?;
    let value = file.value().map_err(fault)?;
    let mut storages: HashMap<String, Tensor> = HashMap::new();
    value.try_map(&mut |name, stored: StoredTensor| {
        let refused = |reason: String| LearnError::Format {
            path: path.to_owned(),
            reason: format!("`{name}`: {reason}"),
        };
        stored.check_bounds(path).map_err(fault)?;
        let key = stored.storage.key.clone();
        if !storages.contains_key(&key) {
            let mut bytes = file.storage(&stored.storage).map_err(fault)?;
            let dtype = stored.storage.dtype;
            let flat = tensor_from_bytes(&mut bytes, &[stored.storage.elements], dtype)
                .map_err(|error| refused(error.to_string()))?;
            storages.insert(key.clone(), flat);
        }
        let flat = storages.get(&key).ok_or_else(|| refused("its storage is missing".into()))?;
        let (size, stride) = (&stored.size[..], &stored.stride[..]);
        let tensor = flat
            .f_as_strided(size, stride, stored.offset)
            .and_then(|view| view.f_contiguous())
            .map_err(|error| refused(error.to_string()))?;
        Ok(tensor)
    })
}
