//! Safetensors out.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use brigade_checkpoint::TensorInfo;
use brigade_checkpoint::safetensors::layout;
use brigade_torch::{Error, bytes, dtype_of};
use tch::{Device, Tensor};

use super::io;
use crate::StateDict;
use crate::error::ModelError;

/// What is copied out of a tensor at a time: small enough for a processor's cache.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

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
