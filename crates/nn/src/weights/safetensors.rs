//! Writing of safetensors.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use brigade_checkpoint::safetensors::{layout, layout_with};
use brigade_checkpoint::{PackedPart, QuantizedDescription, TensorInfo};
use brigade_torch::{Error, QuantizedWeight, bytes, dtype_of};
use tch::{Device, Tensor};
use tempfile::NamedTempFile;

use super::io;
use crate::StateDict;
use crate::error::ModelError;

/// Number of bytes that are copied from a tensor at a time: small enough for a processor's cache.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

pub(super) fn save(state: &StateDict, path: &Path) -> Result<(), Error> {
    let mut infos = Vec::with_capacity(state.len());
    for (name, tensor) in state.iter() {
        infos.push((name, info_of(name, tensor, path)?));
    }
    let mut writer = WeightsWriter::create(path, &infos)?;
    let all: Vec<&Tensor> = state.iter().map(|(_, tensor)| tensor).collect();
    while let Some(place) = writer.next_place() {
        writer.write(all[place])?;
    }
    writer.finish()
}

/// Name of a tensor, the tensor, and its quantised weight with `true` if the tensor is transposed.
type SavedWeight<'m> = (&'m str, Tensor, Option<(QuantizedWeight, bool)>);

/// Writes a model's tensors, quantised weights in Brigade's layout.
pub(crate) fn save_quantized(path: &Path, tensors: Vec<SavedWeight<'_>>) -> Result<(), Error> {
    let mut description = QuantizedDescription::default();
    let mut saved: Vec<(String, TensorInfo, Saved)> = Vec::new();
    for (name, tensor, weight) in tensors {
        let Some((weight, is_transposed)) = weight else {
            saved.push((name.to_owned(), info_of(name, &tensor, path)?, Saved::Tensor(tensor)));
            continue;
        };
        let matrices = (tensor.dim() == 3).then_some(weight.num_matrices().unsigned_abs());
        let parts =
            description.add_packed(name, &weight.to_packed()?, is_transposed, matrices).map_err(
                |error| Error::invalid_argument(format!("save_quantized: `{name}`: {error}")),
            )?;
        for (name, PackedPart { info, bytes, .. }) in parts {
            saved.push((name, info, Saved::Bytes(bytes)));
        }
    }
    let infos: Vec<_> = saved.iter().map(|(name, info, _)| (name.as_str(), info.clone())).collect();
    let metadata = HashMap::from([description.to_metadata()]);
    let layout = layout_with(path, &infos, &metadata)?;
    let mut refused = None;
    let written = write_whole(path, |out| {
        out.write_all(&layout.header)?;
        layout.order.iter().try_for_each(|&place| match &saved[place].2 {
            Saved::Bytes(bytes) => out.write_all(bytes),
            Saved::Tensor(tensor) => write_tensor(tensor, &mut |chunk| out.write_all(chunk))
                .unwrap_or_else(|error| {
                    refused = Some(error);
                    Err(std::io::ErrorKind::Other.into())
                }),
        })
    });
    match (refused, written) {
        (Some(error), _) => Err(error),
        (None, written) => written.map_err(|source| io("write", path, source)),
    }
}

enum Saved {
    Tensor(Tensor),
    Bytes(Vec<u8>),
}

/// Passes a tensor's bytes to a function, in pieces. The outer error is libtorch's.
fn write_tensor(
    tensor: &Tensor,
    write: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
) -> Result<std::io::Result<()>, Error> {
    let plain = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
    Ok(bytes(&plain)?.try_chunks(CHUNK_BYTES, write))
}

/// Returns the type and shape of a tensor that is to be written to `path`.
///
/// # Errors
/// [`brigade_checkpoint::Error::Unsupported`] for a type that safetensors files do not support.
pub fn info_of(name: &str, tensor: &Tensor, path: &Path) -> Result<TensorInfo, Error> {
    let kind = tensor.f_kind().map_err(ModelError::torch(format!("read the kind of {name}")))?;
    let dtype = dtype_of(kind).ok_or_else(|| brigade_checkpoint::Error::Unsupported {
        path: path.to_owned(),
        fact: format!("safetensors cannot hold `{name}` of {kind:?}"),
    })?;
    let shape = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
    Ok(TensorInfo { dtype, shape })
}

/// Writes a safetensors file one tensor after the other, so that they need not be in memory together. The file is
/// renamed to its name when it is complete, as with [`save`](super::save).
///
/// ```
/// use brigade_checkpoint::{Dtype, TensorInfo};
/// use brigade_nn::weights::{self, WeightsWriter};
/// use tch::{Device, Kind, Tensor};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
///
/// let info = |shape: &[u64]| TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() };
/// let infos = [("weight", info(&[2, 3])), ("bias", info(&[2]))];
/// let mut writer = WeightsWriter::create("two.safetensors", &infos)?;
/// while let Some(place) = writer.next_place() {
///     let shape: Vec<i64> = infos[place].1.shape.iter().map(|&size| size as i64).collect();
///     writer.write(&Tensor::ones(shape, (Kind::Float, Device::Cpu)))?;
/// }
/// writer.finish()?;
/// assert_eq!(weights::load("two.safetensors")?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct WeightsWriter {
    path: PathBuf,
    file: NamedTempFile,
    infos: Vec<TensorInfo>,
    /// Indices in the given list, in the order of the file.
    order: Vec<usize>,
    written: usize,
}

impl WeightsWriter {
    /// Creates a file for these tensors.
    ///
    /// # Errors
    /// [`brigade_checkpoint::Error`] for a type that safetensors does not support, and if a file or folder cannot be
    /// created.
    pub fn create(path: impl AsRef<Path>, tensors: &[(&str, TensorInfo)]) -> Result<Self, Error> {
        let path = path.as_ref();
        let layout = layout(path, tensors)?;
        let file = temporary(path).and_then(|file| {
            file.as_file().write_all(&layout.header)?;
            Ok(file)
        });
        Ok(Self {
            path: path.to_owned(),
            file: file.map_err(|source| io("write", path, source))?,
            infos: tensors.iter().map(|(_, info)| info.clone()).collect(),
            order: layout.order,
            written: 0,
        })
    }

    /// Returns the index, in the list of tensors, of the one that has to be written next. `None` after the last.
    #[must_use]
    pub fn next_place(&self) -> Option<usize> {
        self.order.get(self.written).copied()
    }

    /// Writes the tensor of [`WeightsWriter::next_place`], of any device.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if shape or type of the tensor differ from the declared ones, or
    /// if all tensors were already written; [`brigade_checkpoint::Error`] if the file cannot be written; an error of
    /// libtorch if the tensor cannot be copied.
    pub fn write(&mut self, tensor: &Tensor) -> Result<(), Error> {
        let expected = self.next_place().map(|place| &self.infos[place]);
        let shape: Vec<u64> = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
        let found = dtype_of(tensor.f_kind()?).map(|dtype| TensorInfo { dtype, shape });
        if found.as_ref() != expected {
            let text = |info: Option<&TensorInfo>| {
                info.map_or_else(|| "no tensor".to_owned(), ToString::to_string)
            };
            return Err(Error::invalid_argument(format!(
                "{}: the next tensor is {}, and {} was given",
                self.path.display(),
                text(expected),
                text(found.as_ref())
            )));
        }
        let mut out = self.file.as_file();
        write_tensor(tensor, &mut |chunk| out.write_all(chunk))?
            .map_err(|source| io("write", &self.path, source))?;
        self.written += 1;
        Ok(())
    }

    /// Completes the file after all tensors were written, and renames it to its name.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if a tensor is missing; [`brigade_checkpoint::Error`] if a file
    /// cannot be written. An older file of that name is still there then.
    pub fn finish(self) -> Result<(), Error> {
        if self.written < self.order.len() {
            return Err(Error::invalid_argument(format!(
                "{}: {} of {} tensors were written",
                self.path.display(),
                self.written,
                self.order.len()
            )));
        }
        persist(self.file, &self.path).map_err(|source| io("write", &self.path, source))
    }
}

/// Creates a file atomically, even if the machine stops.
pub(super) fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut &File) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let file = temporary(path)?;
    write(&mut file.as_file())?;
    persist(file, path)
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Creates a temporary file in the folder of the final one.
fn temporary(path: &Path) -> std::io::Result<NamedTempFile> {
    tempfile::Builder::new()
        .prefix(".")
        .suffix(".part")
        // Subject to the umask, as any other file; the default of temporary files is 0600.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder_of(path))
}

fn persist(file: NamedTempFile, path: &Path) -> std::io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path)?;
    // The rename changes the folder, which is flushed separately.
    File::open(folder_of(path))?.sync_all()
}
