//! Reading of PyTorch runs' states: a folder of Accelerate's `save_state`, of Hugging Face's Trainer, of DeepSpeed or
//! of `torch.distributed.checkpoint`, or one dictionary that `torch.save` has written, including Lightning's.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::FileTensor;
use super::Weights;
use super::scaler::{self, FromDeepSpeed};
use super::trainer_state::TrainerState;
use super::weights::{WeightsOptions, find_weights, strip_wrapper};
use crate::dcp::{DcpFolder, is_dcp_folder};
use crate::deepspeed::{DeepSpeedFolder, deepspeed_folder, in_32_bits};
use crate::error::{Error, listed};
use crate::pth::{PthFile, weights_under};
use crate::value::Value;
use crate::weights_files::is_weights;

/// A value with the name of its file, or its key.
pub(super) struct Part<T> {
    pub(super) name: String,
    pub(super) value: T,
}

pub(super) type State = Part<Value<FileTensor>>;

/// The states found, each kind in its order.
#[derive(Default)]
pub(super) struct Foreign {
    pub(super) models: Vec<Part<Weights>>,
    pub(super) optimizers: Vec<State>,
    pub(super) schedulers: Vec<State>,
    pub(super) scaler: Option<State>,
    /// Random states by rank, under Accelerate's names.
    pub(super) random: BTreeMap<usize, State>,
    /// Number of optimizer steps, with its source. `None` unless stored outside of an optimizer's state.
    pub(super) steps: Option<Part<u64>>,
    /// `true` if schedulers were stepped once per process at every optimizer step, which is Accelerate's default.
    pub(super) steps_per_process: bool,
    /// Contents that have no place in a Brigade checkpoint, with the reason.
    pub(super) left_out: Vec<String>,
}

impl Foreign {
    /// Files a dictionary value under its kind, by its key.
    fn sort(&mut self, name: String, value: Value<FileTensor>) {
        let is = |names: &[&str]| names.contains(&name.as_str());
        if is(&OPTIMIZERS) {
            self.optimizers.extend(each(name, value));
        } else if is(&SCHEDULERS) {
            self.schedulers.extend(each(name, value));
        } else if is(&SCALERS) {
            self.scaler = Some(Part { name, value });
        } else if is(&RANDOM) && matches!(value, Value::Tensor(_)) {
            let value = Value::dict([("torch_manual_seed", value)]);
            self.random.insert(0, Part { name, value });
        } else {
            let what = match &value {
                Value::Int(number) => format!("the integer {number}"),
                Value::Float(number) => format!("the number {number}"),
                Value::Str(text) if text.len() <= MAX_SHOWN => format!("the text {text:?}"),
                value => value.describe().to_owned(),
            };
            if name == "loops"
                && let Some(batches) = batches_of_epoch(&value).filter(|batches| *batches > 0)
            {
                self.left_out.push(format!(
                    "`loops`: {batches} batches of its epoch, which skip_first_batches passes over"
                ));
                return;
            }
            if name == "global_step"
                && let Some(steps) = value.as_int().and_then(|steps| u64::try_from(steps).ok())
            {
                self.steps = Some(Part { name, value: steps });
                return;
            }
            self.left_out.push(format!("`{name}`: {what}, which has no place in a checkpoint"));
        }
    }
}

pub(super) fn read(from: &Path) -> Result<Foreign, Error> {
    let mut foreign = if is_dcp_folder(from) {
        of_dcp(from)
    } else if from.is_dir() {
        of_folder(from)
    } else {
        of_dictionary(from)
    }?;
    // A disabled scaler has an empty dictionary.
    foreign.scaler = foreign
        .scaler
        .filter(|scaler| scaler.value.as_dict().is_none_or(|entries| !entries.is_empty()));
    Ok(foreign)
}

fn of_folder(folder: &Path) -> Result<Foreign, Error> {
    let mut foreign = Foreign::default();
    let deepspeed = deepspeed_folder(folder)?.map(|it| DeepSpeedFolder::open(&it)).transpose()?;
    let mut files: Vec<String> = fs::read_dir(folder)
        .map_err(Error::io("read", folder))?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    files.sort();
    // Accelerate writes no number for the first of a kind.
    let numbered = |stem: &str, ending: &str, number: usize| match number {
        0 => format!("{stem}.{ending}"),
        number => format!("{stem}_{number}.{ending}"),
    };
    let mut used: Vec<String> = Vec::new();
    // Skipped with DeepSpeed: a Trainer may have written 16-bit weights beside DeepSpeed's 32-bit ones.
    for number in 0..if deepspeed.is_some() { 0 } else { usize::MAX } {
        let names = [
            numbered("model", "safetensors", number),
            numbered("model", "safetensors.index.json", number),
            numbered("pytorch_model", "bin", number),
            numbered("pytorch_model", "bin.index.json", number),
            // With FSDP: the whole model, or the shards of the ranks.
            numbered("pytorch_model_fsdp", "bin", number),
            format!("pytorch_model_fsdp_{number}"),
        ];
        let Some(name) = names.into_iter().find(|name| files.contains(name)) else { break };
        let found = find_weights(&folder.join(&name), &WeightsOptions::default());
        let found = found.map_err(one_alone)?;
        used.push(name.clone());
        foreign.left_out.extend(found.left_out.into_iter().map(|line| format!("{name}: {line}")));
        foreign.models.push(Part { name, value: found.tensors });
    }
    let states = |stem: &str, ending: &str, used: &mut Vec<String>| -> Result<_, Error> {
        let mut found: Vec<State> = Vec::new();
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
    foreign.optimizers = states("optimizer", "bin", &mut used)?;
    if foreign.optimizers.is_empty() {
        foreign.optimizers = sharded_optimizers(folder, &mut used)?;
    }
    foreign.schedulers = states("scheduler", "bin", &mut used)?;
    foreign.scaler = states("scaler", "pt", &mut used)?.pop();
    foreign.steps_per_process = !foreign.schedulers.is_empty();
    // Names of Trainer's files. `scaler.pt` is the same in Accelerate.
    for (kind, name) in
        [(&mut foreign.optimizers, "optimizer.pt"), (&mut foreign.schedulers, "scheduler.pt")]
    {
        if kind.is_empty() && files.iter().any(|file| file == name) {
            used.push(name.to_owned());
            kind.push(Part { name: name.to_owned(), value: tree(&folder.join(name))? });
        }
    }
    if let Some(run) = &deepspeed {
        of_deepspeed(run, &mut foreign)?;
        used.extend(files.iter().filter(|name| is_deepspeeds(name, run)).cloned());
    }
    for name in &files {
        let numbered = |start: &str, end: &str| {
            name.strip_prefix(start)?.strip_suffix(end)?.parse::<usize>().ok()
        };
        let trainers = match name.as_str() {
            "rng_state.pth" => Some(0),
            _ => numbered("rng_state_", ".pth"),
        };
        let rank = numbered("random_states_", ".pkl").or(trainers);
        if let Some(rank) = rank
            && !foreign.random.contains_key(&rank)
        {
            used.push(name.clone());
            let value = tree(&folder.join(name))?;
            let value = if trainers.is_some() { accelerates_names(value) } else { value };
            foreign.random.insert(rank, Part { name: name.clone(), value });
        }
    }
    if files.iter().any(|file| file == TRAINER_STATE) {
        used.push(TRAINER_STATE.to_owned());
        let TrainerState { global_step, epoch } = TrainerState::read(&folder.join(TRAINER_STATE))?;
        foreign.steps = Some(Part { name: TRAINER_STATE.to_owned(), value: global_step });
        let epoch = epoch.map(|epoch| format!("the epoch {epoch} and ")).unwrap_or_default();
        foreign.left_out.push(format!(
            "{TRAINER_STATE}: {epoch}the history, which have no place in a checkpoint; \
             skip_first_batches moves the position in the data"
        ));
    }
    if foreign.models.is_empty() {
        return Err(Error::UnknownFormat {
            path: folder.to_owned(),
            fact: "the folder holds no model.safetensors, no pytorch_model.bin and no pytorch_model_fsdp_0".into(),
        });
    }
    let rest = files.into_iter().filter(|name| !used.contains(name));
    foreign.left_out.extend(rest.filter_map(|name| why_not(&name)));
    Ok(foreign)
}

/// Adds the model and the optimizer of a DeepSpeed step.
fn of_deepspeed(run: &DeepSpeedFolder, foreign: &mut Foreign) -> Result<(), Error> {
    let name = run.folder().file_name().unwrap_or_default().to_string_lossy().into_owned();
    foreign.models.push(Part { name: name.clone(), value: in_32_bits(run.weights()) });
    foreign.left_out.extend_from_slice(run.left_out());
    let value = run.optimizer_state()?;
    foreign.optimizers.push(Part { name: format!("the optimizer of {name}"), value });
    if let Some(all) = run.step() {
        let (name, value) = match run.skipped_steps().filter(|skipped| (1..=all).contains(skipped))
        {
            Some(skipped) => {
                (format!("`global_steps` less `skipped_steps` of {name}"), all - skipped)
            }
            None => (format!("`global_steps` of {name}"), all),
        };
        foreign.steps = Some(Part { name, value });
    }
    if let Some(attributes) = run.scaler().filter(|_| foreign.scaler.is_none()) {
        let name = format!("`loss_scaler` of {name}");
        match scaler::from_deepspeed(attributes) {
            Some(FromDeepSpeed::Dynamic(value, others)) => {
                foreign.left_out.extend(others.map(|others| format!("{name}: {others}")));
                foreign.scaler = Some(Part { name, value });
            }
            // Runs in other types than fp16 have it with a scale of 1.
            Some(FromDeepSpeed::Constant(1.0)) => {}
            Some(FromDeepSpeed::Constant(scale)) => foreign.left_out.push(format!(
                "{name}: a constant scale of {scale}; set it as the initial scale of the program's scaler"
            )),
            None => {
                foreign.left_out.push(format!("{name}: not the attributes of a loss scaler"));
            }
        }
    }
    if let Some(state) = run.scheduler().filter(|_| foreign.schedulers.is_empty()) {
        let scheduler = format!("`lr_scheduler` of {name}");
        match deepspeeds_schedule(state, foreign) {
            Some(value) => foreign.schedulers.push(Part { name: scheduler, value }),
            None => foreign.left_out.push(format!(
                "{scheduler}: neither a schedule of torch.optim.lr_scheduler nor one of DeepSpeed's"
            )),
        }
    }
    Ok(())
}

/// Returns the state of an engine's schedule under PyTorch's names. `None` for one that is neither PyTorch's nor
/// DeepSpeed's.
fn deepspeeds_schedule(state: &Value<FileTensor>, foreign: &Foreign) -> Option<Value<FileTensor>> {
    if state.get("last_epoch").is_some() {
        return Some(state.clone());
    }
    // The index of the last step that was not skipped. PyTorch counts the steps.
    let last = state.get("last_batch_iteration")?.as_int().filter(|last| *last >= -1)?;
    let mut entries = vec![("last_epoch", Value::Int(last.checked_add(1)?))];
    let groups = foreign.optimizers.first().and_then(|it| it.value.get("param_groups"));
    let group = groups.and_then(Value::as_items).and_then(<[_]>::first);
    if let Some(lr) = group.and_then(|group| group.get("lr")) {
        entries.push(("_last_lr", Value::List(vec![lr.clone()])));
    }
    Some(Value::dict(entries))
}

/// Returns `true` if DeepSpeed has written this file or folder besides the step that was read.
fn is_deepspeeds(name: &str, run: &DeepSpeedFolder) -> bool {
    let is_step = run.folder().file_name().is_some_and(|step| step == name);
    is_step
        || ["latest", "latest_universal", "zero", "zero_to_fp32.py", "zero_to_torch.py"]
            .contains(&name)
        || name.ends_with("_states.pt")
}

/// Returns the optimizers that Accelerate has saved in folders of their own, with FSDP.
fn sharded_optimizers(folder: &Path, used: &mut Vec<String>) -> Result<Vec<State>, Error> {
    let mut found = Vec::new();
    for number in 0.. {
        let name = format!("optimizer_{number}");
        let path = folder.join(&name);
        if !is_dcp_folder(&path) {
            break;
        }
        let states = DcpFolder::open(&path)?.states(&[])?;
        let state = states.into_iter().find(|(key, _)| OPTIMIZERS.contains(&key.as_str()));
        let (_, value) = state.ok_or_else(|| Error::Unsupported {
            path,
            fact: format!(
                "it has no optimizer's state under any of the keys {}",
                OPTIMIZERS.join(", ")
            ),
        })?;
        used.push(name.clone());
        found.push(Part { name, value: with_state(value) });
    }
    Ok(found)
}

/// Reads a folder of `torch.distributed.checkpoint`: the models, and the states saved with them.
fn of_dcp(folder: &Path) -> Result<Foreign, Error> {
    let mut foreign = Foreign::default();
    let mut saved = DcpFolder::open(folder)?;
    let mut models: Vec<String> = Vec::new();
    let mut next = None;
    while models.len() < MAX_MODELS && next.as_deref().is_none_or(|key| saved.has(key)) {
        let mut found = saved.weights(next.as_deref()).map_err(one_alone)?;
        strip_wrapper(&mut found.tensors);
        let name = if found.key.is_empty() { "the model" } else { &found.key };
        foreign.models.push(Part { name: name.to_owned(), value: found.tensors });
        models.push(found.key);
        next = Some(format!("{}_{}", models[0], models.len()));
    }
    let mut states = saved.states(&models)?;
    // The second of a kind has number 1.
    states.sort_by_key(|(name, _)| numbered_key(name).1);
    for (name, value) in states {
        let is_optimizer = OPTIMIZERS.contains(&numbered_key(&name).0);
        if is_optimizer {
            foreign.optimizers.extend(each(name, with_state(value)));
        } else {
            foreign.sort(name, value);
        }
    }
    Ok(foreign)
}

/// Splits a key into its stem and number: `optim_1` is the second optimizer.
fn numbered_key(key: &str) -> (&str, u64) {
    let parts = key.rsplit_once('_').and_then(|(stem, number)| Some((stem, number.parse().ok()?)));
    parts.unwrap_or((key, 0))
}

/// Adds an empty `state` to an optimizer state without one: `torch.distributed.checkpoint` does not keep empty
/// dictionaries.
fn with_state(value: Value<FileTensor>) -> Value<FileTensor> {
    match value {
        Value::Dict(mut entries)
            if entries.iter().any(|(key, _)| key.as_str() == Some("param_groups"))
                && !entries.iter().any(|(key, _)| key.as_str() == Some("state")) =>
        {
            entries.push((Value::Str("state".into()), Value::Dict(Vec::new())));
            Value::Dict(entries)
        }
        value => value,
    }
}

/// Renames the random states of a Trainer's rank to Accelerate's names.
fn accelerates_names(state: Value<FileTensor>) -> Value<FileTensor> {
    let Value::Dict(entries) = state else { return state };
    let renamed = entries.into_iter().map(|(key, value)| {
        let name = match key.as_str() {
            Some("cpu") => "torch_manual_seed",
            Some("cuda") => "torch_cuda_manual_seed",
            _ => return (key, value),
        };
        // A single process saves one state, several save those of all devices.
        let value = match value {
            Value::Tensor(_) if name == "torch_cuda_manual_seed" => Value::List(vec![value]),
            value => value,
        };
        (Value::Str(name.to_owned()), value)
    });
    Value::Dict(renamed.collect())
}

/// Returns the reason why a file is not converted. `None` for the parts of an index, which were read.
fn why_not(name: &str) -> Option<String> {
    let reason = match name {
        name if name.starts_with("sampler") => {
            "the order of the data comes from the loader's own seed"
        }
        name if name.starts_with("dl_state_dict") => {
            "Python's data loader counts its batches in another way; use skip_first_batches"
        }
        name if name.starts_with("custom_checkpoint") => "an object defined by the program",
        "training_args.bin" => "the options of a Trainer, which are objects of Python",
        name if is_weights(name)
            || (name.starts_with("pytorch_model-") && name.ends_with(".bin")) =>
        {
            return None;
        }
        _ => "not a state of Accelerate's save_state or of a Trainer",
    };
    Some(format!("{name}: {reason}"))
}

fn of_dictionary(path: &Path) -> Result<Foreign, Error> {
    let refuse = |fact: String| Error::Unsupported { path: path.to_owned(), fact };
    let file = PthFile::open(path)?;
    let Value::Dict(entries) = file.value()? else {
        return Err(refuse("it holds no dictionary".into()));
    };
    let file = Arc::new(Mutex::new(file));
    let mut foreign = Foreign::default();
    for (key, value) in entries {
        let name = key.as_str().unwrap_or("a key that is not a string").to_owned();
        if MODELS.contains(&name.as_str()) && value.as_dict().is_some() {
            match weights_under(path, &value, &name) {
                Ok(state) => {
                    let tensors = state.tensors.into_iter();
                    let mut value: Weights = tensors
                        .map(|(name, tensor)| (name, FileTensor::stored(&file, tensor)))
                        .collect();
                    strip_wrapper(&mut value);
                    foreign.left_out.extend(state.left_out);
                    foreign.models.push(Part { name, value });
                    continue;
                }
                // Settings of a model, stored beside its weights.
                Err(Error::NoStateDict { .. }) => {}
                Err(error) => return Err(one_alone(error)),
            }
        }
        let value =
            value.try_map(&mut |_, tensor| Ok::<_, Error>(FileTensor::stored(&file, tensor)))?;
        foreign.sort(name, value);
    }
    // Lightning counts the steps of all optimizers together.
    if foreign.optimizers.len() > 1
        && let Some(steps) = foreign.steps.take()
    {
        let line = format!("`{}`: {} steps of all optimizers together", steps.name, steps.value);
        foreign.left_out.push(line);
    }
    if foreign.models.is_empty() {
        return Err(refuse(format!(
            "it has no model's state under any of the keys {}",
            MODELS.join(", ")
        )));
    }
    Ok(foreign)
}

/// Returns the states of a list, as Lightning keeps optimizers and schedulers, or a single state.
fn each(name: String, value: Value<FileTensor>) -> Vec<State> {
    match value {
        Value::List(items) | Value::Tuple(items) => {
            let items = items.into_iter().enumerate();
            items.map(|(index, value)| Part { name: format!("{name}[{index}]"), value }).collect()
        }
        value => vec![Part { name, value }],
    }
}

/// Returns the number of batches trained in the current epoch, from Lightning's loop state. `None` if the epoch is
/// complete.
fn batches_of_epoch(loops: &Value<FileTensor>) -> Option<i64> {
    let progress = loops.get("fit_loop")?.get("epoch_loop.batch_progress")?;
    if progress.get("is_last_batch").and_then(Value::as_bool) == Some(true) {
        return None;
    }
    progress.get("current")?.get("processed")?.as_int()
}

/// Explains how to choose one of several state dictionaries, for which a conversion of all states has no option.
fn one_alone(error: Error) -> Error {
    match error {
        Error::SeveralStateDicts { path, keys } => Error::Unsupported {
            fact: format!(
                "it holds {} state dictionaries where those of one model belong: {}; convert the one to \
                 use on its own first (`brigade checkpoint convert {} model.safetensors --key KEY`)",
                keys.len(),
                listed(&keys),
                path.file_name().unwrap_or_default().display()
            ),
            path,
        },
        error => error,
    }
}

/// Returns the whole value of a `torch.save` file. Objects that are not plain values are reduced to their names.
fn tree(path: &Path) -> Result<Value<FileTensor>, Error> {
    let file = PthFile::open(path)?;
    let value = file.value()?;
    let file = Arc::new(Mutex::new(file));
    value.try_map(&mut |_, tensor| Ok(FileTensor::stored(&file, tensor)))
}

/// Keys under which people and frameworks save a model's weights.
const MODELS: [&str; 5] = ["model", "model_state_dict", "state_dict", "model_state", "net"];
const OPTIMIZERS: [&str; 6] = [
    "optimizer",
    "optimizer_state_dict",
    "optimizer_state",
    "optim",
    "optimizers",
    "optimizer_states",
];
const SCHEDULERS: [&str; 7] = [
    "schedulers",
    "lr_schedulers",
    "scheduler",
    "scheduler_state_dict",
    "lr_scheduler",
    "lr_scheduler_state_dict",
    "scheduler_state",
];
const SCALERS: [&str; 6] = [
    "scaler",
    "scaler_state_dict",
    "grad_scaler",
    "scaler_state",
    // Names of Lightning's plugins.
    "MixedPrecision",
    "MixedPrecisionPlugin",
];
/// Keys of the state of PyTorch's CPU random generator.
const RANDOM: [&str; 3] = ["rng_state", "torch_rng_state", "cpu_rng_state"];
const TRAINER_STATE: &str = "trainer_state.json";
const MAX_SHOWN: usize = 60;
/// Maximum number of models in a folder. Each one costs a search among all names.
const MAX_MODELS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_states_of_trainers_have_accelerates_names() {
        let bytes = |byte| Value::Tensor(FileTensor::bytes(&[byte]));
        let first = |state: &Value<FileTensor>| {
            let devices = state.get("torch_cuda_manual_seed").and_then(Value::as_items).unwrap();
            (devices.len(), devices[0].as_tensor().unwrap().read().unwrap())
        };
        let one = accelerates_names(Value::dict([("cpu", bytes(1)), ("cuda", bytes(2))]));
        assert!(one.get("torch_manual_seed").is_some());
        assert_eq!(first(&one), (1, vec![2]));
        let all = Value::List(vec![bytes(3), bytes(4)]);
        let several = accelerates_names(Value::dict([("python", Value::None), ("cuda", all)]));
        assert_eq!(first(&several), (2, vec![3]));
        assert!(several.get("python").is_some());
    }
}
