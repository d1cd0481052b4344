//! A model's weights, wherever they lie.

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

/// Which weights of a file are meant, and in which form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightsOptions {
    /// The key of the state dictionary in a file of `torch.save`, see
    /// [`PthFile::state_dict`](crate::pth::PthFile::state_dict); of a checkpoint, the name of the model.
    /// Defaults to the only state dictionary, and to the first model.
    pub key: Option<String>,
    /// What is taken off the names; tensors of other names are left out. Defaults to the prefixes of
    /// PyTorch's wrappers, where all names have them.
    pub prefix: Option<String>,
    /// The type of the floating-point tensors: F64, F32, F16 or BF16. Defaults to that of each tensor.
    pub dtype: Option<Dtype>,
}

/// Weights, and how they were found.
#[derive(Debug, Default)]
pub struct FoundWeights {
    /// Names and tensors.
    pub tensors: Weights,
    /// The key of the state dictionary in its file; empty where it is all of the file.
    pub key: String,
    /// What was done: one line each.
    pub read: Vec<String>,
    /// What lies beside the tensors: one line each.
    pub left_out: Vec<String>,
}

/// Reads the names of a weights file, of an index of several, or of a folder of either: safetensors, or
/// a state dictionary of `torch.save`, which may lie in a dictionary. Also those of folders that
/// `torch.distributed.checkpoint` or DeepSpeed has written. The prefixes of
/// DistributedDataParallel and `torch.compile` are taken off.
///
/// # Errors
/// What is wrong with the files; [`Error::UnknownFormat`] for a folder without weights;
/// [`Error::NoStateDict`], [`Error::SeveralStateDicts`].
pub fn read_weights(path: &Path) -> Result<Weights, Error> {
    Ok(find_weights(path, &WeightsOptions::default())?.tensors)
}

/// As [`read_weights`], with options, and with what was done.
///
/// # Errors
/// As there; [`Error::NoSuchKey`]; [`Error::Unsupported`] where no name has the prefix, or a tensor cannot
/// have the type; [`Error::Damaged`] where shards hold something else than their
/// index says.
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

/// The weights of a step that DeepSpeed has saved, or one of the states that its optimizer has of each.
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

    /// Brings names and types into the form that `options` ask for.
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

/// Takes off what PyTorch's wrappers put before every name, and returns it.
pub(super) fn strip_wrapper(weights: &mut Weights) -> String {
    let names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    let prefix = wrapper_prefix(&names, &[""; 0]);
    for (name, _) in weights {
        name.drain(..prefix.len());
    }
    prefix
}

/// A checkpoint's model.
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
