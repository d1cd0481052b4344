//! The states of a run of PyTorch's, wherever they lie: a folder of Accelerate's `save_state`, or one
//! dictionary that `torch.save` has written.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::FileTensor;
use super::weights::{Weights, is_weights, read_weights, strip_wrapper};
use crate::error::Error;
use crate::pth::PthFile;
use crate::value::Value;

/// Something with the name of its file, or its key.
pub(super) struct Part<T> {
    pub(super) name: String,
    pub(super) value: T,
}

pub(super) type State = Part<Value<FileTensor>>;

/// What was found, each kind in its order.
#[derive(Default)]
pub(super) struct Foreign {
    pub(super) models: Vec<Part<Weights>>,
    pub(super) optimizers: Vec<State>,
    pub(super) schedulers: Vec<State>,
    pub(super) scaler: Option<State>,
    /// By rank.
    pub(super) random: BTreeMap<usize, State>,
    /// What has no place in a checkpoint of ours, with the reason.
    pub(super) left_out: Vec<String>,
}

pub(super) fn read(from: &Path) -> Result<Foreign, Error> {
    if from.is_dir() { of_folder(from) } else { of_dictionary(from) }
}

fn of_folder(folder: &Path) -> Result<Foreign, Error> {
    let mut foreign = Foreign::default();
    let mut files: Vec<String> = fs::read_dir(folder)
        .map_err(Error::io("read", folder))?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    files.sort();
    // Accelerate's first of a kind has no number.
    let numbered = |stem: &str, ending: &str, number: usize| match number {
        0 => format!("{stem}.{ending}"),
        number => format!("{stem}_{number}.{ending}"),
    };
    let mut used: Vec<String> = Vec::new();
    for number in 0.. {
        let names = [
            numbered("model", "safetensors", number),
            numbered("model", "safetensors.index.json", number),
            numbered("pytorch_model", "bin", number),
            numbered("pytorch_model", "bin.index.json", number),
        ];
        let Some(name) = names.into_iter().find(|name| files.contains(name)) else { break };
        let value = read_weights(&folder.join(&name))?;
        used.push(name.clone());
        foreign.models.push(Part { name, value });
    }
    let mut states = |stem: &str, ending: &str| -> Result<Vec<State>, Error> {
        let mut found = Vec::new();
        for number in 0.. {
            let name = numbered(stem, ending, number);
            if !files.contains(&name) {
                break;
            }
            used.push(name.clone());
            found.push(Part { value: tree(&folder.join(&name))?, name });
        }
        Ok(found)
    };
    foreign.optimizers = states("optimizer", "bin")?;
    foreign.schedulers = states("scheduler", "bin")?;
    foreign.scaler = states("scaler", "pt")?.pop();
    for name in &files {
        let rank = name.strip_prefix("random_states_").and_then(|rest| rest.strip_suffix(".pkl"));
        if let Some(rank) = rank.and_then(|rank| rank.parse().ok()) {
            used.push(name.clone());
            let value = tree(&folder.join(name))?;
            foreign.random.insert(rank, Part { name: name.clone(), value });
        }
    }
    if foreign.models.is_empty() {
        return Err(Error::UnknownFormat {
            path: folder.to_owned(),
            fact: "the folder holds no model.safetensors and no pytorch_model.bin".into(),
        });
    }
    let rest = files.into_iter().filter(|name| !used.contains(name));
    foreign.left_out.extend(rest.filter_map(|name| why_not(&name)));
    Ok(foreign)
}

/// What is in a file of Accelerate's that is not carried. `None` for the parts of an index.
fn why_not(name: &str) -> Option<String> {
    let reason = match name {
        name if name.starts_with("sampler") => {
            "the order of the data comes from the loader's own seed"
        }
        name if name.starts_with("dl_state_dict") => {
            "Python's data loader counts its batches in another way; use skip_first_batches"
        }
        name if name.starts_with("custom_checkpoint") => "an object of the program's own",
        name if is_weights(name)
            || (name.starts_with("pytorch_model-") && name.ends_with(".bin")) =>
        {
            return None;
        }
        _ => "not a file of Accelerate's save_state",
    };
    Some(format!("{name}: {reason}"))
}

fn of_dictionary(path: &Path) -> Result<Foreign, Error> {
    let refuse = |fact: String| Error::Unsupported { path: path.to_owned(), fact };
    let Value::Dict(entries) = tree(path)? else {
        return Err(refuse("it holds no dictionary".into()));
    };
    let mut foreign = Foreign::default();
    for (key, value) in entries {
        let name = key.as_str().unwrap_or("a key that is not a string").to_owned();
        let is = |names: &[&str]| names.contains(&name.as_str());
        if is(&MODELS) {
            let value = weights(value).map_err(|fact| refuse(format!("its `{name}` {fact}")))?;
            foreign.models.push(Part { name, value });
        } else if is(&OPTIMIZERS) {
            foreign.optimizers.push(Part { name, value });
        } else if is(&SCHEDULERS) {
            foreign.schedulers.push(Part { name, value });
        } else if is(&SCALERS) {
            foreign.scaler = Some(Part { name, value });
        } else {
            let what = match &value {
                Value::Int(number) => format!("the integer {number}"),
                Value::Float(number) => format!("the number {number}"),
                Value::Str(text) if text.len() <= MAX_SHOWN => format!("the text {text:?}"),
                value => value.describe().to_owned(),
            };
            foreign.left_out.push(format!("`{name}`: {what}, which has no place in a checkpoint"));
        }
    }
    if foreign.models.is_empty() {
        return Err(refuse(format!(
            "it has no model's state under any of the keys {}",
            MODELS.join(", ")
        )));
    }
    Ok(foreign)
}

fn weights(value: Value<FileTensor>) -> Result<Weights, String> {
    let Value::Dict(entries) = value else {
        return Err(format!("is {}, not a state dictionary", value.describe()));
    };
    let entries = entries.into_iter().map(|entry| match entry {
        (Value::Str(name), Value::Tensor(tensor)) => Ok((name, tensor)),
        (key, value) => Err(format!(
            "has {} under `{}`, not only tensors",
            value.describe(),
            key.as_str().unwrap_or("a key that is not a string")
        )),
    });
    let mut weights: Weights = entries.collect::<Result<_, _>>()?;
    strip_wrapper(&mut weights);
    Ok(weights)
}

/// All of a file of `torch.save`; of objects that are not plain values only the names.
fn tree(path: &Path) -> Result<Value<FileTensor>, Error> {
    let file = PthFile::open(path)?;
    let value = file.value()?;
    let file = Arc::new(Mutex::new(file));
    value.try_map(&mut |_, tensor| Ok(FileTensor::stored(&file, tensor)))
}

/// Keys that people and frameworks use.
const MODELS: [&str; 5] = ["model", "model_state_dict", "state_dict", "model_state", "net"];
const OPTIMIZERS: [&str; 4] = ["optimizer", "optimizer_state_dict", "optimizer_state", "optim"];
const SCHEDULERS: [&str; 5] = [
    "scheduler",
    "scheduler_state_dict",
    "lr_scheduler",
    "lr_scheduler_state_dict",
    "scheduler_state",
];
const SCALERS: [&str; 4] = ["scaler", "scaler_state_dict", "grad_scaler", "scaler_state"];
const MAX_SHOWN: usize = 60;
