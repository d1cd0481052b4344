//! Conversion of weights and states between layouts: Brigade's, PyTorch's, `torch.distributed.checkpoint`'s,
//! Accelerate's, DeepSpeed's, Hugging Face Trainer's and Lightning's.
//!
//! Tensors are copied from file to file in pieces. No model is in memory as a whole.

mod accelerate;
mod dcp;
mod foreign;
mod like;
mod parts;
mod quantize;
mod scaler;
mod scheduler;
mod tied;
mod torch_scheduler;
mod trainer_state;
mod weights;

use std::fs;
use std::path::{Path, PathBuf};

pub use accelerate::AccelerateRun;
pub use like::{StateKind, convert_like};
pub use quantize::{QuantizeOptions, quantize};
pub use trainer_state::TrainerState;
pub use weights::{FoundWeights, WeightsOptions, find_weights, read_weights};

use crate::dcp::dcp_folder;
use crate::deepspeed::deepspeed_folder;
use crate::error::Error;
pub use crate::file_tensor::{FileTensor, Weights};
use crate::format::WeightsFormat;
use crate::layout::{Checkpoint, MANIFEST, Object};
use crate::value::Value;
use crate::weights_files::is_weights;

/// Target of a conversion.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// A file of this format with a model's weights.
    Weights(&'static dyn WeightsFormat),
    /// A folder with a model's weights in safetensors files of at most this many bytes and their index, as Hugging
    /// Face's libraries write them: `model-00001-of-00002.safetensors`, or one `model.safetensors` if the weights fit.
    Parts(u64),
    /// A folder in the layout of Accelerate's `save_state`.
    Accelerate(AccelerateRun),
    /// A folder for `torch.distributed.checkpoint.load`, written as by one rank: models under `model`, `model_1`, ...,
    /// and optimizers under `optim`, `optim_1`, ... in the form of `get_optimizer_state_dict`. A source of weights
    /// files, or a conversion with options, gives one model.
    Dcp,
}

/// Report of a conversion: the files written, and the choices, losses and changes on the way.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Paths of the files written.
    pub written: Vec<PathBuf>,
    /// Description of the source of weights: one line each for the kind of checkpoint, the state dictionary and the
    /// prefix removed from its names, as far as they apply.
    pub read: Vec<String>,
    /// Contents of the source that were not converted, because the target has no place for them or their form is
    /// unknown. One line each, with the reason.
    pub left_out: Vec<String>,
    /// States taken from the checkpoint `like` of [`convert_like`]. One line each.
    pub kept: Vec<String>,
    /// Values converted to another form or filled in. One line each.
    pub changed: Vec<String>,
}

/// Converts a checkpoint, a folder of weights or a weights file.
///
/// `to` must not exist. It appears complete, or not at all after an error.
///
/// # Errors
/// Fails with [`Error::Occupied`] if `to` exists, with [`Error::Io`], or with an error about the source.
pub fn convert(from: &Path, to: &Path, target: Target) -> Result<Report, Error> {
    convert_with(from, to, target, &WeightsOptions::default())
}

/// Converts like [`convert`], limited to the weights that `options` choose. [`Target::Accelerate`] allows no options.
///
/// # Errors
/// Returns the errors of [`convert`] and of [`find_weights`].
pub fn convert_with(
    from: &Path,
    to: &Path,
    target: Target,
    options: &WeightsOptions,
) -> Result<Report, Error> {
    must_be_free(to)?;
    let folder = match to.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let partial = tempfile::Builder::new()
        .prefix(".")
        .suffix(".partial")
        .tempdir_in(folder)
        .map_err(Error::temporary(to, folder))?;
    convert_in(partial.path(), from, to, target, options)
        .map_err(|error| error.renamed(partial.path(), to))
}

/// Writes the target into the folder `partial`, then renames it.
fn convert_in(
    partial: &Path,
    from: &Path,
    to: &Path,
    target: Target,
    options: &WeightsOptions,
) -> Result<Report, Error> {
    let mut report = Report::default();
    let checkpoint =
        if from.join(MANIFEST).is_file() { Some(Checkpoint::open(from)?) } else { None };
    let made = match (target, &checkpoint) {
        (Target::Accelerate(_), _) if *options != WeightsOptions::default() => {
            return Err(Error::Unsupported {
                path: from.to_owned(),
                fact: "Accelerate's layout has all of a checkpoint as it is: a key, a prefix and a type \
                       are for one file of weights"
                    .into(),
            });
        }
        (Target::Accelerate(run), Some(checkpoint)) => {
            let made = partial.join("accelerate");
            fs::create_dir(&made).map_err(Error::io("make", &made))?;
            accelerate::write(checkpoint, &made, run, &mut report)?;
            made
        }
        (Target::Accelerate(_), None) => {
            return Err(Error::NotACheckpoint {
                path: from.to_owned(),
                fact: format!(
                    "it has no {MANIFEST}, and Accelerate's layout is made of one that has; to bring \
                     a run of PyTorch's or Accelerate's in, give --like with a checkpoint that your \
                     program has saved"
                ),
            });
        }
        (Target::Dcp, checkpoint) => {
            let made = partial.join("dcp");
            fs::create_dir(&made).map_err(Error::io("make", &made))?;
            match checkpoint {
                Some(checkpoint) if *options == WeightsOptions::default() => {
                    dcp::write(checkpoint, &made, &mut report)?;
                }
                checkpoint => {
                    let weights = weights_of(from, checkpoint.as_ref(), options, &mut report)?;
                    dcp::write_weights(&made, &weights)?;
                    report.changed.extend(weights.iter().filter_map(overflow));
                }
            }
            made
        }
        (Target::Weights(format), checkpoint) => {
            let weights = weights_of(from, checkpoint.as_ref(), options, &mut report)?;
            let made = partial.join("weights");
            format.write(&made, &weights)?;
            report.changed.extend(weights.iter().filter_map(overflow));
            made
        }
        (Target::Parts(max_bytes), checkpoint) => {
            let weights = weights_of(from, checkpoint.as_ref(), options, &mut report)?;
            let made = partial.join("parts");
            fs::create_dir(&made).map_err(Error::io("make", &made))?;
            parts::write(&made, &weights, max_bytes)?;
            report.changed.extend(weights.iter().filter_map(overflow));
            made
        }
    };
    fs::rename(&made, to).map_err(Error::io("rename", &made))?;
    report.written = match fs::read_dir(to) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(_) => vec![to.to_owned()],
    };
    report.written.sort();
    Ok(report)
}

/// Returns the state tree of an object, with its tensors.
fn read(checkpoint: &Checkpoint, object: &Object) -> Result<Value<FileTensor>, Error> {
    let Some(state) = checkpoint.state(object)? else { return Ok(Value::None) };
    let mut stored = checkpoint.stored(object)?;
    let path = || checkpoint.folder().to_owned();
    state.try_map(&mut |_, name| {
        let tensor = stored.remove(&name).ok_or_else(|| Error::Damaged {
            path: path(),
            fact: format!("the tensor `{name}` of {} is missing", object.name),
        })?;
        FileTensor::of_checkpoint(tensor).map_err(|fact| Error::Unsupported {
            path: path(),
            fact: format!("`{name}` of {}: {fact}", object.name),
        })
    })
}

fn not_understood(checkpoint: &Checkpoint, object: &Object) -> Error {
    Error::Damaged {
        path: checkpoint.folder().to_owned(),
        fact: format!("the state of {} has not the form of its kind, {}", object.name, object.kind),
    }
}

/// Returns the weights of a checkpoint's model, of another library's folder, or of weights files.
fn weights_of(
    from: &Path,
    checkpoint: Option<&Checkpoint>,
    options: &WeightsOptions,
    report: &mut Report,
) -> Result<Weights, Error> {
    let mut weights = match checkpoint {
        Some(checkpoint) => of_model(checkpoint, options, report)?,
        None => {
            if dcp_folder(from)?.is_none() && deepspeed_folder(from)?.is_none() {
                name_other_files(from, report);
            }
            find_weights(from, options)?
        }
    };
    report.read.append(&mut weights.read);
    report.left_out.append(&mut weights.left_out);
    Ok(weights.tensors)
}

fn must_be_free(to: &Path) -> Result<(), Error> {
    match to.symlink_metadata() {
        Ok(_) => Err(Error::Occupied { path: to.to_owned(), fact: "it already exists".into() }),
        Err(_) => Ok(()),
    }
}

/// Returns a message if values of a tensor overflow the data type in which they were written.
fn overflow((name, tensor): &(String, FileTensor)) -> Option<String> {
    use crate::pth::TensorData;
    let values = match tensor.overflowed() {
        0 => return None,
        1 => "1 value is infinite".to_owned(),
        values => format!("{values} values are infinite"),
    };
    Some(format!(
        "`{}`: {values}, being too large for {}",
        name.escape_debug(),
        tensor.info().dtype
    ))
}

/// Returns the first model of a checkpoint, or the one named `options.key`.
fn of_model(
    checkpoint: &Checkpoint,
    options: &WeightsOptions,
    report: &mut Report,
) -> Result<FoundWeights, Error> {
    let path = checkpoint.folder().to_owned();
    let chosen = |object: &&Object| options.key.as_ref().is_none_or(|key| *object.name == **key);
    let models = || checkpoint.manifest().of_kind("model");
    let Some(model) = models().find(chosen) else {
        return Err(match &options.key {
            Some(key) => Error::NoSuchKey {
                path,
                key: key.clone(),
                keys: models().map(|object| object.name.to_string()).collect(),
            },
            None => Error::NotACheckpoint { path, fact: "it holds no model".into() },
        });
    };
    let others = checkpoint.manifest().objects.iter().filter(|object| object.name != model.name);
    report.left_out.extend(
        others.map(|object| {
            format!("{}: a weights file holds one model and nothing else", object.name)
        }),
    );
    let mut found =
        FoundWeights { tensors: weights::of_object(checkpoint, model)?, ..FoundWeights::default() };
    found.take(options).map_err(|fact| Error::Unsupported { path, fact })?;
    Ok(found)
}

/// Reports the files of a foreign checkpoint other than its weights as left out.
fn name_other_files(from: &Path, report: &mut Report) {
    let Ok(entries) = fs::read_dir(from) else { return };
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| !is_weights(name))
        .collect();
    names.sort();
    report
        .left_out
        .extend(names.into_iter().map(|name| format!("{name}: a weights file holds one model")));
}
