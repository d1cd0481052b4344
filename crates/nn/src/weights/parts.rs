//! Writing of weights in several files with an index.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use brigade_checkpoint::safetensors::layout;
use brigade_checkpoint::shards::{self, Index, IndexMetadata};
use brigade_checkpoint::{FileName, TensorInfo};
use brigade_torch::Error;
use tch::Tensor;

use super::{WeightsWriter, io};

const STEM: &str = "model";

/// Writes tensors one after the other into a folder: to `model.safetensors`, or, if they do not fit into one file of
/// `max_bytes`, to `model-00001-of-00002.safetensors` and so on with `model.safetensors.index.json`, as Hugging Face's
/// libraries write them (`max_shard_size`) and [`load`](super::load) reads them.
///
/// ```
/// use brigade_checkpoint::{Dtype, TensorInfo};
/// use brigade_nn::weights::{self, PartsWriter};
/// use tch::{Device, Kind, Tensor};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
///
/// let info = |shape: &[u64]| TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() };
/// let infos = [("weight", info(&[2, 3])), ("bias", info(&[2]))];
/// let mut writer = PartsWriter::create("weights", &infos, 24)?;
/// while let Some(place) = writer.next_place() {
///     let shape: Vec<i64> = infos[place].1.shape.iter().map(|&size| size as i64).collect();
///     writer.write(&Tensor::ones(shape, (Kind::Float, Device::Cpu)))?;
/// }
/// writer.finish()?;
/// assert!(std::path::Path::new("weights/model-00002-of-00002.safetensors").exists());
/// assert_eq!(weights::load("weights")?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PartsWriter {
    folder: PathBuf,
    tensors: Vec<(String, TensorInfo)>,
    /// Indices in the list of tensors, by file.
    parts: Vec<Vec<usize>>,
    /// Index of the open file.
    part: usize,
    writer: WeightsWriter,
}

impl PartsWriter {
    /// Creates files for these tensors, and the folder if it does not exist. A tensor of more than `max_bytes` has a
    /// file of its own.
    ///
    /// # Errors
    /// [`brigade_checkpoint::Error`] for a type that safetensors does not support, and if a file or folder cannot be
    /// created.
    pub fn create(
        folder: impl AsRef<Path>,
        tensors: &[(&str, TensorInfo)],
        max_bytes: u64,
    ) -> Result<Self, Error> {
        let folder = folder.as_ref();
        // Fails before anything is written.
        layout(folder, tensors)?;
        fs::create_dir_all(folder).map_err(|source| io("make", folder, source))?;
        let tensors: Vec<(String, TensorInfo)> =
            tensors.iter().map(|(name, info)| ((*name).to_owned(), info.clone())).collect();
        let parts = cut(&tensors, max_bytes);
        let writer = begin(folder, &tensors, &parts, 0)?;
        Ok(Self { folder: folder.to_owned(), tensors, parts, part: 0, writer })
    }

    /// Returns the indices of the tensors in the order in which a writer takes them, for ranks that do not write but
    /// take part in gathering each tensor.
    ///
    /// # Errors
    /// [`brigade_checkpoint::Error`] for a type that safetensors does not support.
    pub fn order(tensors: &[(&str, TensorInfo)], max_bytes: u64) -> Result<Vec<usize>, Error> {
        let owned: Vec<(String, TensorInfo)> =
            tensors.iter().map(|(name, info)| ((*name).to_owned(), info.clone())).collect();
        let mut order = Vec::with_capacity(tensors.len());
        for part in cut(&owned, max_bytes) {
            let infos: Vec<_> = part.iter().map(|&place| tensors[place].clone()).collect();
            order.extend(layout(Path::new(STEM), &infos)?.order.into_iter().map(|at| part[at]));
        }
        Ok(order)
    }

    /// Returns the index, in the list of tensors, of the one that has to be written next. `None` after the last.
    #[must_use]
    pub fn next_place(&self) -> Option<usize> {
        match self.writer.next_place() {
            Some(place) => Some(self.parts[self.part][place]),
            None => self.first_of(self.part + 1),
        }
    }

    /// Writes the tensor of [`PartsWriter::next_place`], of any device.
    ///
    /// # Errors
    /// Returns the same errors as [`WeightsWriter::write`].
    pub fn write(&mut self, tensor: &Tensor) -> Result<(), Error> {
        if self.writer.next_place().is_none() && self.part + 1 < self.parts.len() {
            let next = begin(&self.folder, &self.tensors, &self.parts, self.part + 1)?;
            std::mem::replace(&mut self.writer, next).finish()?;
            self.part += 1;
        }
        self.writer.write(tensor)
    }

    /// Completes the last file, writes the index if there are several files, and removes the weights of an earlier save
    /// in this folder, which would be read instead of the new ones or together with them.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if a tensor is missing; [`brigade_checkpoint::Error`] if a file
    /// cannot be written.
    pub fn finish(self) -> Result<(), Error> {
        let Self { folder, tensors, parts, part, writer } = self;
        if part + 1 < parts.len() {
            return Err(Error::invalid_argument(format!(
                "{}: tensors of {} of {} files were written",
                folder.display(),
                part + 1,
                parts.len()
            )));
        }
        writer.finish()?;
        let mut written: Vec<String> = (0..parts.len())
            .map(|part| Ok(name(part, &parts)?.to_string()))
            .collect::<Result<_, Error>>()?;
        if parts.len() > 1 {
            let mut index =
                Index { metadata: IndexMetadata::default(), weight_map: BTreeMap::new() };
            for (part, places) in parts.iter().enumerate() {
                for &place in places {
                    let (tensor, info) = &tensors[place];
                    index.metadata.total_size += info.bytes().unwrap_or(0);
                    index.weight_map.insert(tensor.clone(), name(part, &parts)?);
                }
            }
            let file = shards::index_name(&stem()?).to_string();
            super::safetensors::write_whole(&folder.join(&file), |out| {
                std::io::Write::write_all(out, index.to_json().as_bytes())
            })
            .map_err(|source| io("write", &folder, source))?;
            written.push(file);
        }
        remove_others(&folder, &written)
    }

    /// Returns the tensor that is written first into a file: the first one among those with the widest elements.
    fn first_of(&self, part: usize) -> Option<usize> {
        let width = |place: &usize| std::cmp::Reverse(self.tensors[*place].1.dtype.bits());
        self.parts.get(part)?.iter().copied().min_by_key(width)
    }
}

fn cut(tensors: &[(String, TensorInfo)], max_bytes: u64) -> Vec<Vec<usize>> {
    let sizes: Vec<u64> =
        tensors.iter().map(|(_, info)| info.bytes().unwrap_or(u64::MAX)).collect();
    let mut parts = shards::cut(&sizes, max_bytes);
    if parts.is_empty() {
        parts.push(Vec::new());
    }
    parts
}

fn begin(
    folder: &Path,
    tensors: &[(String, TensorInfo)],
    parts: &[Vec<usize>],
    part: usize,
) -> Result<WeightsWriter, Error> {
    let infos: Vec<(&str, TensorInfo)> = parts[part]
        .iter()
        .map(|&place| (tensors[place].0.as_str(), tensors[place].1.clone()))
        .collect();
    WeightsWriter::create(folder.join(&*name(part, parts)?), &infos)
}

fn stem() -> Result<FileName, Error> {
    FileName::new(STEM).map_err(Error::custom)
}

fn name(part: usize, parts: &[Vec<usize>]) -> Result<FileName, Error> {
    Ok(shards::file_name(&stem()?, part, parts.len()))
}

fn remove_others(folder: &Path, written: &[String]) -> Result<(), Error> {
    for entry in fs::read_dir(folder).map_err(|source| io("read", folder, source))? {
        let path = entry.map_err(|source| io("read", folder, source))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_part = name.starts_with("model-") && name.ends_with(".safetensors");
        let is_whole = name == "model.safetensors" || name == "model.safetensors.index.json";
        if (is_part || is_whole) && !written.contains(&name) {
            fs::remove_file(&path).map_err(|source| io("remove", &path, source))?;
        }
    }
    Ok(())
}
