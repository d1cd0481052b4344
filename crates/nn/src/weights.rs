//! Reading and writing of weights files: safetensors and PyTorch's `.pth`.
//!
//! The format is recognized by the first bytes, not by the file's name. Nothing in a file is executed, and no file,
//! even a malicious one, takes memory out of proportion to its size.

mod parts;
mod pth;
mod safetensors;

use std::collections::HashMap;
use std::path::Path;

#[cfg(doc)]
use brigade_checkpoint::pth::PthFile;
use brigade_checkpoint::{
    Error as FileError, OpenWeights, TensorReader, WeightsFile, WeightsReader, open_weights,
};
use brigade_sharding::TensorPart;
use brigade_torch::{
    Error, TensorId, TensorRead, has_memory, loaded_kind, read_tensors, unallocated,
};
use tch::{Device, Kind, Tensor};

pub use self::parts::PartsWriter;
pub use self::safetensors::{WeightsWriter, info_of};
use crate::deferred::no_memory;
use crate::error::ModelError;
use crate::model::Shapes;
use crate::param_registry::Role;
use crate::tensor_parallel::part_reads;
use crate::{LoadReport, Model, StateDict};

/// Reads a safetensors file, or a `.pth`, `.pt`, `.bin` or `.ckpt` file of `torch.save` that contains one state
/// dictionary, alone or in a dictionary (by the rule of [`PthFile::state_dict`]). Also reads the state dictionary of an
/// archive of TorchScript or of `torch.export.save`, and several files with an index, or a folder of them, as Hugging
/// Face's libraries write them ([`open_weights`]).
///
/// Tensors are on the CPU, in the kind and shape in which they were saved. Names are those of the file;
/// [`Model::load_state_dict`] removes the prefixes of wrappers.
///
/// ```
/// use brigade_nn::weights;
/// # use brigade_nn::{Linear, Model};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// # let model = Model::new(|p| Linear::new(p, 784, 10))?;
/// # weights::save(&model.state_dict(), "linear.safetensors")?;
///
/// let state = weights::load("linear.safetensors")?;
/// assert_eq!(state.get("weight").map(|weight| weight.size()), Some(vec![10, 784]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_checkpoint::Error`] for a file that cannot be read, has an unknown format, is damaged, contains element
/// types that tensors of a model cannot have (floats of 8 bits, quantized integers and others), has no state
/// dictionary, or has several, of which [`load_entry`] selects one.
pub fn load(path: impl AsRef<Path>) -> Result<StateDict, Error> {
    load_all(path.as_ref(), None)
}

/// Reads the state dictionary at one key of a `.pth` file, such as `model_ema` in
/// `{"model": {…}, "model_ema": {…}, "epoch": 3}`. Keys of nested dictionaries have dots between them. The other
/// tensors of the file are not read.
///
/// ```no_run
/// let state = brigade_nn::weights::load_entry("checkpoint.pth", "model_ema")?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`load`], and an error if the key does not exist.
pub fn load_entry(path: impl AsRef<Path>, entry: &str) -> Result<StateDict, Error> {
    load_all(path.as_ref(), Some(entry))
}

/// Writes a safetensors file that PyTorch, Brigade and others read.
///
/// The file is written under a temporary name in the same folder, flushed to the disk, and renamed when it is complete.
/// A tensor that has two names is written twice, under both, so that readers without support of sharing can find it.
///
/// ```
/// use brigade_nn::{Linear, Model, weights};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// let model = Model::new(|p| Linear::new(p, 784, 10))?;
/// weights::save(&model.state_dict(), "linear.safetensors")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_checkpoint::Error`] if the file cannot be written, or for a kind that safetensors does not support;
/// [`crate::ModelError::Torch`] if a tensor cannot be copied from its device. An older file of that name still exists
/// then.
pub fn save(state: &StateDict, path: impl AsRef<Path>) -> Result<(), Error> {
    safetensors::save(state, path.as_ref())
}

/// Writes the dictionary to a `.pth` file, like `torch.save`, for programs that do not support safetensors, such as
/// fastai. `torch.load` reads it, also with `weights_only`, and so does [`load`].
///
/// The file is renamed to its name when it is complete, as with [`save`]. A tensor that has two names is written twice.
///
/// ```
/// use brigade_nn::{Linear, Model, weights};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// let model = Model::new(|p| Linear::new(p, 784, 10))?;
/// weights::save_pth(&model.state_dict(), "linear.pth")?;
/// assert_eq!(weights::load("linear.pth")?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_checkpoint::Error`] if the file cannot be written, or for a kind that the format does not support. An
/// older file of that name still exists then.
pub fn save_pth(state: &StateDict, path: impl AsRef<Path>) -> Result<(), Error> {
    pth::save(state, path.as_ref())
}

impl<M> Model<M> {
    /// Loads weights from a file, or from several files, into the model, if they match in every name and shape. The
    /// formats are those of [`load`].
    ///
    /// It is equivalent to [`Model::load_state_dict`] with the result of [`load`], but tensors are read directly into
    /// those of the model; see [`read`] for the memory that it takes.
    ///
    /// # Errors
    /// Returns the errors of [`load`] and of [`Model::load_state_dict`], with nothing changed.
    /// [`crate::ModelError::Interrupted`] if reading fails after the checks: some tensors then have the values of the
    /// file, some may have a part of them, and the others are unchanged.
    pub fn load_weights(&mut self, path: impl AsRef<Path>) -> Result<LoadReport, Error> {
        self.load_file(path.as_ref(), None)
    }

    /// Loads the state dictionary at one key of a `.pth` file into the model, like [`Model::load_weights`]. See
    /// [`load_entry`] for the key.
    ///
    /// ```no_run
    /// # use brigade_nn::{Linear, Model};
    /// # let mut model = Model::new(|p| Linear::new(p, 784, 10))?;
    /// let report = model.load_entry("checkpoint.pth", "model_ema")?;
    /// println!("{report}");
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`load_entry`] and of [`Model::load_weights`].
    pub fn load_entry(&mut self, path: impl AsRef<Path>, key: &str) -> Result<LoadReport, Error> {
        self.load_file(path.as_ref(), Some(key))
    }

    fn load_file(&mut self, path: &Path, key: Option<&str>) -> Result<LoadReport, Error> {
        self.check_not_dispatched("load weights")?;
        let weights = WeightsReader::open_entry(path, key)?;
        let (values, report) = self.matched(&weights)?;
        let values =
            values.into_iter().map(|(from, into)| (from.name().to_owned(), into)).collect();
        self.read_from(weights, values)?;
        Ok(report)
    }

    /// Reads tensors of open weights files into tensors of the model. Each pair contains a name in the weights and a
    /// tensor of the model. Tensors of a deferred model are read when they are allocated.
    ///
    /// # Errors
    /// Returns the errors of [`read`].
    pub fn read_from(
        &mut self,
        weights: WeightsReader,
        tensors: Vec<(String, Tensor)>,
    ) -> Result<(), Error> {
        self.check_not_quantized("read weights into the model")?;
        let is_later = |tensor: &Tensor| self.is_deferred() && !has_memory(tensor);
        let parts: HashMap<TensorId, TensorPart> = self
            .divided_parameters()
            .into_iter()
            .map(|divided| (TensorId::of(&divided.tensor), divided.part))
            .collect();
        let mut now = Vec::new();
        for (name, into) in &tensors {
            let from = weights.get(name).ok_or_else(|| {
                Error::invalid_argument(format!("the weights have no tensor `{name}`"))
            })?;
            let part = parts.get(&TensorId::of(into));
            if is_later(into) {
                // TorchTPU makes no view, and so no part, of a tensor without memory.
                let options = (into.f_kind()?, Device::Cpu);
                let like = unallocated(&into.size(), None, options, &no_memory(name))?;
                part_reads(from, &like, None, part)?.iter().try_for_each(TensorRead::check)?;
            } else {
                now.extend(part_reads(from, into, None, part)?);
            }
        }
        read(&weights, now)?;
        if let Some(deferred) = self.deferred_values() {
            let (later, now): (Vec<_>, Vec<_>) =
                tensors.into_iter().partition(|(_, tensor)| !has_memory(tensor));
            now.iter().for_each(|(_, tensor)| deferred.keep(TensorId::of(tensor)));
            let later = later.into_iter().map(|(name, tensor)| {
                // Each name of tied weights is read.
                let id = TensorId::of(&tensor);
                (name, id, parts.get(&id).cloned())
            });
            deferred.read_later(weights, later);
        }
        Ok(())
    }

    /// Compares open weights files with the model like [`Model::load_weights`], without reading values. Returns each
    /// tensor of the files with the corresponding tensor of the model, and the report. For models whose tensors cannot
    /// be read into directly, such as sharded ones.
    ///
    /// # Errors
    /// Returns the errors of [`Model::load_state_dict`], and an error for a type that tensors cannot have.
    pub fn matched<'w>(
        &self,
        weights: &'w WeightsReader,
    ) -> Result<(Vec<(TensorReader<'w>, Tensor)>, LoadReport), Error> {
        let shape = |tensor: TensorReader<'_>| Ok((tensor.name().to_owned(), shape_of(tensor)?));
        let shapes = weights.tensors().map(shape).collect::<Result<Shapes, Error>>()?;
        let mut plan = self.plan(&shapes).complete()?;
        weights.key().clone_into(&mut plan.report.key);
        for tensor in weights.tensors() {
            kind_of(tensor)?;
        }
        let values = plan.values.into_iter();
        let values = values.filter_map(|found| Some((weights.get(&found.name)?, found.into)));
        Ok((values.collect(), plan.report))
    }

    /// Writes a model with quantised weights to a safetensors file: quantised weights in their quantised format, all
    /// other tensors as by [`Model::save_weights`]. [`Model::load_weights`] of a deferred model reads it, without the
    /// original weights. A model without quantised weights is written as by [`Model::save_weights`]. The layout does
    /// not depend on processors and kernels.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Weights};
    /// use tch::{Kind, Tensor};
    /// # let folder = tempfile::tempdir()?;
    /// # std::env::set_current_dir(&folder)?;
    ///
    /// let mut model = Model::new(|path| Linear::new(path / "fc", 32, 8))?;
    /// model.quantize(&Weights::int4(32))?;
    /// model.save_quantized("int4.safetensors")?;
    ///
    /// let mut again = Model::deferred(|path| Linear::new(path / "fc", 32, 8))?;
    /// again.load_weights("int4.safetensors")?;
    /// again.materialize()?;
    /// let input = Tensor::ones([1, 32], (Kind::Float, model.device()));
    /// assert_eq!(again.forward(&input)?, model.forward(&input)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Model::save_weights`].
    pub fn save_quantized(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.check_values("save_quantized")?;
        self.check_undivided("save_quantized")?;
        let saved =
            self.distinct().filter(|entry| entry.role != (Role::Buffer { persistent: false }));
        let saved = saved.map(|entry| {
            let weight = self
                .quantized_slot(&entry.name)
                .and_then(|slot| Some((slot.get()?, slot.is_transposed)));
            (entry.name.as_str(), entry.tensor.detach(), weight)
        });
        safetensors::save_quantized(path.as_ref(), saved.collect())
    }

    /// Writes parameters and persistent buffers to a safetensors file; see [`save`].
    ///
    /// # Errors
    /// Returns the errors of [`save`]; [`brigade_torch::ErrorKind::InvalidArgument`] for a model that is divided over
    /// the ranks of a tensor group.
    pub fn save_weights(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.check_not_quantized("save_weights")?;
        self.check_undivided("save_weights")?;
        save(&self.state_dict(), path)
    }
}

/// Reads tensors of open weights files into existing tensors, such as a model's: whole tensors, or the regions of a
/// sharded parameter that a rank has.
///
/// First everything is checked: each read, and the checksums of files that contain them (`.pth`, which is read once
/// more for that). Then the tensors are read in up to four threads. This takes no additional memory for a contiguous CPU
/// tensor of the file's kind and layout; otherwise at most 16 MB, or the size of the elements in a `.pth` file that a
/// self-overlapping view covers.
///
/// ```
/// use brigade_checkpoint::WeightsReader;
/// use brigade_nn::{Linear, Model, weights};
/// use brigade_torch::TensorRead;
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// # Model::new(|p| Linear::new(p / "encoder", 784, 10))?.save_weights("encoder.safetensors")?;
///
/// let model = Model::new(|p| Linear::new(p / "head", 784, 10))?;
/// let file = WeightsReader::open("encoder.safetensors")?;
/// let reads = model.state_dict().into_iter().filter_map(|(name, into)| {
///     Some(TensorRead::whole(file.get(&name.replace("head", "encoder"))?, into))
/// });
/// weights::read(&file, reads.collect())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns the errors of [`TensorRead::check`] and of [`WeightsReader::verify`], with nothing changed.
/// [`ModelError::Interrupted`] if reading fails afterwards: some tensors then have the values of the file, some may have
/// a part of them, and the others are unchanged.
pub fn read(weights: &WeightsReader, reads: Vec<TensorRead<'_>>) -> Result<(), Error> {
    reads.iter().try_for_each(TensorRead::check)?;
    weights.verify()?;
    read_tensors(reads, ModelError::interrupted)
}

fn load_all(path: &Path, entry: Option<&str>) -> Result<StateDict, Error> {
    let mut all: Option<StateDict> = None;
    for file in open_weights(path, entry)? {
        let state = match file.weights {
            OpenWeights::Storages(opened, found) => pth::load(&file.path, *opened, found)?,
            OpenWeights::Ranges(..) => load_ranges(file)?,
        };
        match &mut all {
            None => all = Some(state),
            Some(all) => state.into_iter().try_for_each(|(name, it)| all.insert(name, it))?,
        }
    }
    Ok(all.unwrap_or_default())
}

fn load_ranges(file: WeightsFile) -> Result<StateDict, Error> {
    let mut state = StateDict::new();
    for tensor in WeightsReader::new(vec![file])?.tensors() {
        let form = (kind_of(tensor)?, Device::Cpu);
        let values = Tensor::f_empty(shape_of(tensor)?, form).map_err(|error| {
            damaged(tensor.path(), format!("libtorch refuses a tensor of it: {error}"))
        })?;
        TensorRead::whole(tensor, values.shallow_clone()).read()?;
        state.insert(tensor.name(), values)?;
    }
    Ok(state)
}

fn kind_of(tensor: TensorReader<'_>) -> Result<Kind, Error> {
    loaded_kind(tensor.name(), tensor.info().dtype).map_err(|fact| unsupported(tensor.path(), fact))
}

fn shape_of(tensor: TensorReader<'_>) -> Result<Vec<i64>, Error> {
    let shape = tensor.info().shape.iter().map(|&size| i64::try_from(size));
    shape.collect::<Result<_, _>>().map_err(|error| damaged(tensor.path(), error.to_string()))
}

fn io(doing: &'static str, path: &Path, source: std::io::Error) -> Error {
    FileError::Io { doing, path: path.to_owned(), source }.into()
}

fn unsupported(path: &Path, fact: String) -> Error {
    FileError::Unsupported { path: path.to_owned(), fact }.into()
}

fn damaged(path: &Path, fact: String) -> Error {
    FileError::Damaged { path: path.to_owned(), fact }.into()
}
