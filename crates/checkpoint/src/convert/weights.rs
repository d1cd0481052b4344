//! Reading of a model's weights, from any supported layout.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::dcp::{DcpWeights, dcp_folder, dcp_weights};
use crate::deepspeed::{DeepSpeedFolder, deepspeed_folder};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::file_tensor::{FileTensor, Weights, is_float};
use crate::format::OpenWeights;
use crate::layout::{Checkpoint, Object, TensorLocation};
use crate::pth::shown;
use crate::weights_files::{WeightsFile, open_weights};
use crate::wrapper_prefix;

/// Options that choose the weights of a source, and their names and data type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightsOptions {
    /// Key of the state dictionary in a `torch.save` file, see
    /// [`PthFile::state_dict`](crate::pth::PthFile::state_dict), or name of the model in a checkpoint. Defaults to the
    /// only state dictionary, or to the first model.
    pub key: Option<String>,
    /// Prefix to remove from the names. Tensors without it are left out. Defaults to the prefixes of PyTorch's
    /// wrappers, if all names have them.
    pub prefix: Option<String>,
    /// Data type of the floating-point tensors: F64, F32, F16 or BF16. Defaults to the type of each tensor.
    pub dtype: Option<Dtype>,
}

/// Weights, with a report of how they were found.
#[derive(Debug, Default)]
pub struct FoundWeights {
    /// Tensors with their names.
    pub tensors: Weights,
    /// Key of the state dictionary in its file. Empty if it is the whole file.
    pub key: String,
    /// Steps of reading, such as a prefix that was removed. One line each.
    pub read: Vec<String>,
    /// Contents of the source that are not tensors of the model. One line each.
    pub left_out: Vec<String>,
}

/// Reads the names and places of a model's weights.
///
/// `path` is a weights file, an index of several, or a folder of either: safetensors, or a state dictionary of
/// `torch.save`, which may be nested in a dictionary. It may also be a folder of `torch.distributed.checkpoint` or
/// DeepSpeed. The prefixes of DistributedDataParallel and `torch.compile` are removed.
///
/// # Errors
/// Fails with [`Error::UnknownFormat`] for a folder without weights, with [`Error::NoStateDict`] or
/// [`Error::SeveralStateDicts`], or with an error about the files.
pub fn read_weights(path: &Path) -> Result<Weights, Error> {
    Ok(find_weights(path, &WeightsOptions::default())?.tensors)
}

/// Reads weights like [`read_weights`], with options, and reports how they were found.
///
/// # Errors
/// Returns the errors of [`read_weights`]; [`Error::NoSuchKey`]; [`Error::Unsupported`] if no name has the prefix or a
/// tensor cannot be converted to the data type; [`Error::Damaged`] if shards do not match their index.
pub fn find_weights(path: &Path, options: &WeightsOptions) -> Result<FoundWeights, Error> {
    let mut found = FoundWeights::default();
    if let Some(folder) = dcp_folder(path)? {
        let weights = dcp_weights(&folder, options.key.as_deref())?;
        let DcpWeights { tensors, key, read, left_out } = weights;
        found = FoundWeights { tensors, key, read: vec![read], left_out };
    } else if let Some(folder) = deepspeed_folder(path)? {
        found = of_deepspeed(&DeepSpeedFolder::open(&folder)?, options)?;
    } else {
        for file in open_weights(path, options.key.as_deref())? {
            found.add(file);
        }
    }
    if !found.key.is_empty() {
        found.read.push(format!("the state dictionary under `{}`", shown(&found.key)));
    }
    found.take(options).map_err(|fact| Error::Unsupported { path: path.to_owned(), fact })?;
    Ok(found)
}

/// Returns the weights of a DeepSpeed step, or one state of its optimizer for each weight.
fn of_deepspeed(run: &DeepSpeedFolder, options: &WeightsOptions) -> Result<FoundWeights, Error> {
    let mut found = FoundWeights { read: vec![run.to_string()], ..FoundWeights::default() };
    match &options.key {
        Some(key) => {
            found.tensors = run.slot(key)?;
            found.key.clone_from(key);
        }
        None => {
            found.tensors.clone_from(run.weights());
            found.read.extend(run.read_beside());
            let line = "the optimizer's states: a weights file holds one model and nothing else";
            found.left_out.push(line.to_owned());
            found.left_out.extend_from_slice(run.left_out());
        }
    }
    Ok(found)
}

impl FoundWeights {
    fn add(&mut self, WeightsFile { path, weights }: WeightsFile) {
        match weights {
            OpenWeights::Ranges(_, entries) => {
                self.tensors.extend(entries.into_iter().map(|entry| {
                    let (path, offset) = (path.clone(), entry.range.start);
                    let place = TensorLocation { path, offset, info: entry.info };
                    (entry.name, FileTensor::placed(place))
                }));
            }
            OpenWeights::Storages(file, state) => {
                let file = Arc::new(Mutex::new(*file));
                let tensors = state.tensors.into_iter();
                self.tensors.extend(
                    tensors.map(|(name, tensor)| (name, FileTensor::stored(&file, tensor))),
                );
                self.key = state.key;
                self.left_out.extend(state.left_out);
            }
        }
    }

    /// Applies `options` to names and data types.
    pub(super) fn take(&mut self, options: &WeightsOptions) -> Result<(), String> {
        if let Some(prefix) = &options.prefix {
            self.take_prefix(prefix)?;
        }
        let stripped = strip_wrapper(&mut self.tensors);
        if !stripped.is_empty() {
            self.read.push(names_without(&stripped, self.tensors.len()));
        }
        let Some(dtype) = options.dtype else { return Ok(()) };
        if !is_float(dtype) {
            return Err(format!(
                "tensors cannot be converted to {dtype}: F64, F32, F16 and BF16 are possible"
            ));
        }
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        self.tensors = tensors.map(|(name, tensor)| (name, tensor.cast(dtype))).collect();
        Ok(())
    }

    fn take_prefix(&mut self, prefix: &str) -> Result<(), String> {
        let has = |prefix: &str| {
            self.tensors
                .iter()
                .any(|(name, _)| name.len() > prefix.len() && name.starts_with(prefix))
        };
        let prefix = if !prefix.ends_with('.') && has(&format!("{prefix}.")) {
            format!("{prefix}.")
        } else {
            prefix.to_owned()
        };
        if !has(&prefix) {
            let mut first: Vec<&str> =
                self.tensors.iter().filter_map(|(name, _)| name.split('.').next()).collect();
            first.dedup();
            first.truncate(MAX_PREFIXES);
            let first: Vec<String> =
                first.into_iter().map(|it| format!("`{}`", shown(it))).collect();
            return Err(format!(
                "no name begins with `{prefix}`; names begin with {}",
                first.join(", ")
            ));
        }
        let mut taken = Vec::with_capacity(self.tensors.len());
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            match name.strip_prefix(&prefix).filter(|rest| !rest.is_empty()) {
                Some(rest) => taken.push((rest.to_owned(), tensor)),
                None => self
                    .left_out
                    .push(format!("`{}`: its name does not begin with `{prefix}`", shown(&name))),
            }
        }
        self.read.push(names_without(&prefix, taken.len()));
        self.tensors = taken;
        Ok(())
    }
}

fn names_without(prefix: &str, names: usize) -> String {
    let prefix = shown(prefix);
    match names {
        1 => format!("1 name, without the prefix `{prefix}`"),
        names => format!("{names} names, without the prefix `{prefix}`"),
    }
}

/// Removes the prefix that PyTorch's wrappers put before every name, and returns it.
pub(super) fn strip_wrapper(weights: &mut Weights) -> String {
    let names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    let prefix = wrapper_prefix(&names, &[""; 0]);
    for (name, _) in weights {
        name.drain(..prefix.len());
    }
    prefix
}

/// Returns the weights of a checkpoint's model.
pub(super) fn of_object(checkpoint: &Checkpoint, model: &Object) -> Result<Weights, Error> {
    let stored = checkpoint.stored(model)?.into_iter();
    let tensors = stored.map(|(name, tensor)| {
        let tensor = FileTensor::of_checkpoint(tensor).map_err(|fact| {
            let path = checkpoint.folder().to_owned();
            Error::Unsupported { path, fact: format!("`{name}` of {}: {fact}", model.name) }
        })?;
        Ok((name, tensor))
    });
    let mut weights: Weights = tensors.collect::<Result<_, Error>>()?;
    weights.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(weights)
}

const MAX_PREFIXES: usize = 10;
