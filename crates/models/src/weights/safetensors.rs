//! Safetensors files of tensors.
//!
//! Read at the tensors' places, not through a memory map: a map would fault where another process
//! truncates the file, and its pages would count as memory beside those of the tensors.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use brigade_checkpoint::TensorInfo;
use brigade_checkpoint::safetensors::{Header, layout};
use brigade_torch::{as_bytes, fill_bytes};
use tch::{Device, Kind, Tensor};

use super::kinds::{dtype_of, kind_of};
use crate::{Error, StateDict};

pub(super) fn load(path: &Path, file: &File) -> Result<StateDict, Error> {
    let header = Header::read(path, file)?;
    let mut state = StateDict::new();
    for entry in header.tensors {
        let damaged = |fact: String| Error::Damaged { path: path.to_owned(), fact };
        let shape = entry.info.shape.iter().map(|&size| i64::try_from(size));
        let shape: Vec<i64> =
            shape.collect::<Result<_, _>>().map_err(|error| damaged(error.to_string()))?;
        let mut tensor = Tensor::f_empty(shape, (kind_of(entry.info.dtype), Device::Cpu))
            .map_err(|error| damaged(format!("libtorch refuses a tensor of it: {error}")))?;
        fill_bytes(&mut tensor, |bytes| {
            file.read_exact_at(bytes, entry.range.start).map_err(Filling::Io)
        })
        .map_err(|filling| match filling {
            Filling::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                damaged("it ends too early".into())
            }
            Filling::Io(source) => Error::Io { doing: "read", path: path.to_owned(), source },
            Filling::Torch(error) => damaged(error.to_string()),
        })?;
        state.insert(entry.name, tensor)?;
    }
    Ok(state)
}

enum Filling {
    Io(std::io::Error),
    Torch(brigade_torch::Error),
}

impl From<brigade_torch::Error> for Filling {
    fn from(error: brigade_torch::Error) -> Self {
        Self::Torch(error)
    }
}

/// A tensor with a copy of these bytes, of which there are as many as shape and kind say.
pub(super) fn tensor(bytes: &mut [u8], shape: &[i64], kind: Kind) -> Result<Tensor, tch::TchError> {
    if kind == Kind::Bool {
        // C++ knows only two values of bool; any other byte would be undefined behaviour.
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    Tensor::f_from_data_size(bytes, shape, kind)
}

pub(super) fn save(state: &StateDict, path: &Path) -> Result<(), Error> {
    let mut tensors = Vec::with_capacity(state.len());
    for (name, tensor) in state.iter() {
        let kind = tensor.f_kind().map_err(Error::torch(format!("read the kind of {name}")))?;
        let dtype = dtype_of(kind).ok_or_else(|| Error::Unsupported {
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
            out.write_all(as_bytes(&plain).map_err(std::io::Error::other)?)?;
        }
        Ok(())
    })
    .map_err(|source| Error::Io { doing: "write", path: path.to_owned(), source })
}

/// Writes a file that appears whole or not at all, even when the machine stops.
fn write_whole(
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
