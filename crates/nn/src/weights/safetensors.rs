//! Files in which each tensor is a range of bytes, and safetensors out.
//!
//! Plain tensors are read into; the others are filled in pieces. A file that is cut short meanwhile is an error.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use brigade_checkpoint::TensorInfo;
use brigade_checkpoint::safetensors::{Entry, layout};
use brigade_torch::{Error, TensorFile, TorchError, bytes, dtype_of, loaded_kind};
use tch::{Device, Kind, TchError, Tensor};

use super::{damaged, io};
use crate::error::ModelError;
use crate::model::Shapes;
use crate::{LoadReport, Model, StateDict};

/// What is copied out of a tensor at a time: small enough for a processor's cache.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

pub(super) fn load(path: &Path, file: File, entries: Vec<Entry>) -> Result<StateDict, Error> {
    let mut state = StateDict::new();
    let file = tensor_file(path, file)?;
    for entry in entries {
        let form = (kind(path, &entry)?, Device::Cpu);
        let refused =
            |error: TchError| damaged(path, format!("libtorch refuses a tensor of it: {error}"));
        let mut tensor = Tensor::f_empty(shape(path, &entry)?, form).map_err(refused)?;
        fill(&file, &entry, &mut tensor)?;
        state.insert(entry.name, tensor)?;
    }
    Ok(state)
}

/// Straight into the model's tensors, when all fit.
pub(super) fn load_into<M>(
    model: &Model<M>,
    path: &Path,
    file: File,
    tensors: &[Entry],
) -> Result<LoadReport, Error> {
    let file = tensor_file(path, file)?;
    let mut shapes = Shapes::new();
    for entry in tensors {
        shapes.insert(entry.name.clone(), shape(path, entry)?);
    }
    let plan = model.plan(&shapes).complete()?;
    let interrupted = |source| ModelError::Interrupted { path: path.to_owned(), source };
    let entries: HashMap<&str, &Entry> =
        tensors.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    for entry in tensors {
        kind(path, entry)?;
    }
    for (name, mut tensor) in plan.values {
        let Some(entry) = entries.get(name.as_str()) else { continue };
        fill(&file, entry, &mut tensor).map_err(interrupted)?;
    }
    Ok(plan.report)
}

fn kind(path: &Path, entry: &Entry) -> Result<Kind, Error> {
    loaded_kind(&entry.name, entry.info.dtype).map_err(|fact| super::unsupported(path, fact))
}

fn shape(path: &Path, entry: &Entry) -> Result<Vec<i64>, Error> {
    let shape = entry.info.shape.iter().map(|&size| i64::try_from(size));
    shape.collect::<Result<_, _>>().map_err(|error| damaged(path, error.to_string()))
}

fn tensor_file(path: &Path, file: File) -> Result<TensorFile, Error> {
    TensorFile::from_file(path, file).map_err(|error| unread(path, error))
}

fn fill(file: &TensorFile, entry: &Entry, tensor: &mut Tensor) -> Result<(), Error> {
    let filled = file.convert_into(entry.range.start, kind(file.path(), entry)?, tensor);
    filled.map_err(|error| unread(file.path(), error))
}

fn unread(path: &Path, error: Error) -> Error {
    match error.downcast() {
        Ok(TorchError::Read { path, source }) => io("read", &path, source),
        Ok(TorchError::CutShort { expected, found, .. }) => damaged(
            path,
            format!("it was cut short while it was read: expected {expected} bytes, found {found}"),
        ),
        Ok(TorchError::Tensor(source)) => {
            ModelError::Torch { doing: "copy values of a file".into(), source }.into()
        }
        Ok(other) => damaged(path, other.to_string()),
        Err(other) => damaged(path, other.to_string()),
    }
}

pub(super) fn save(state: &StateDict, path: &Path) -> Result<(), Error> {
    let mut tensors = Vec::with_capacity(state.len());
    for (name, tensor) in state.iter() {
        let kind =
            tensor.f_kind().map_err(ModelError::torch(format!("read the kind of {name}")))?;
        let dtype = dtype_of(kind).ok_or_else(|| brigade_checkpoint::Error::Unsupported {
            path: path.to_owned(),
            fact: format!("safetensors cannot hold `{name}` of {kind:?}"),
        })?;
        let shape = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
        tensors.push((name, TensorInfo { dtype, shape }));
    }
    let layout = layout(path, &tensors)?;
    let in_order: Vec<&Tensor> = {
        let all: Vec<&Tensor> = state.iter().map(|(_, tensor)| tensor).collect();
        layout.order.iter().map(|&place| all[place]).collect()
    };
    write_whole(path, |out| {
        out.write_all(&layout.header)?;
        for tensor in in_order {
            let plain = tensor.f_to_device(Device::Cpu).and_then(|t| t.f_contiguous());
            let plain = plain.map_err(std::io::Error::other)?;
            let plain = bytes(&plain).map_err(std::io::Error::other)?;
            plain.try_chunks(CHUNK_BYTES, |chunk| out.write_all(chunk))?;
        }
        Ok(())
    })
    .map_err(|source| io("write", path, source))
}

/// Writes a file that appears whole or not at all, even when the machine stops.
pub(super) fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut &File) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let temporary = tempfile::Builder::new()
        .prefix(".")
        .suffix(".part")
        // Less the umask, as any other file; the default of temporary files is 0600.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    write(&mut temporary.as_file())?;
    temporary.as_file().sync_all()?;
    temporary.persist(path)?;
    // The rename is in the folder, which is flushed by itself.
    File::open(folder)?.sync_all()
}
