//! The layout of Accelerate's `save_state`.

use std::collections::BTreeMap;
use std::path::Path;

use super::torch_scheduler::{self, Steps, TorchScheduler};
use super::weights::of_object;
use super::{FileTensor, Report, not_understood, read, scaler};
use crate::error::Error;
use crate::format::{write_pth, write_safetensors};
use crate::layout::{Checkpoint, Object};
use crate::torch_optimizer::to_torch;
use crate::value::Value;

/// The Accelerate run that will load the target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AccelerateRun {
    /// Number of processes. Defaults to the checkpoint's world size.
    pub num_processes: Option<usize>,
    /// `true` if the run steps a scheduler once per optimizer step (`split_batches=True`, or
    /// `step_scheduler_with_optimizer=False`), instead of once per process. Defaults to `false`.
    pub split_batches: bool,
}

pub(super) fn write(
    checkpoint: &Checkpoint,
    folder: &Path,
    run: AccelerateRun,
    report: &mut Report,
) -> Result<(), Error> {
    let schedulers = schedulers(checkpoint, run)?;
    let left_out = &mut report.left_out;
    for object in &checkpoint.manifest().objects {
        let number = object.name.rsplit_once('_').map_or("", |(_, number)| number);
        let numbered = |stem: &str, ending: &str| match number {
            "" => folder.join(format!("{stem}.{ending}")),
            number => folder.join(format!("{stem}_{number}.{ending}")),
        };
        match object.kind.as_str() {
            "model" => {
                let path = numbered("model", "safetensors");
                write_safetensors(&path, &of_object(checkpoint, object)?)?;
            }
            "optimizer" => {
                let state = read(checkpoint, object)?;
                let scheduler = schedulers.iter().find(|made| {
                    made.optimizer.is_some_and(|optimizer| optimizer.name == object.name)
                });
                match to_torch(&state, left_out) {
                    Some(state) => {
                        let groups = scheduler.map_or(&[][..], |made| &made.torch.groups);
                        write_pth(&numbered("optimizer", "bin"), &with_group_keys(state, groups))?;
                    }
                    None => return Err(not_understood(checkpoint, object)),
                }
            }
            "scheduler" => {
                let made = schedulers.iter().find(|made| made.object.name == object.name);
                if let Some(Scheduler { torch, .. }) = made {
                    write_pth(&numbered("scheduler", "bin"), &torch.state)?;
                    let TorchScheduler { class, count, .. } = torch;
                    report.changed.push(format!("{}: for {class}, at {count}", object.name));
                }
            }
            "scaler" => match scaler::to_torch(&read(checkpoint, object)?) {
                Some(state) => write_pth(&folder.join("scaler.pt"), &state)?,
                None => return Err(not_understood(checkpoint, object)),
            },
            "rank" => rank(checkpoint, object, number, folder, left_out)?,
            "loader" => left_out.push(format!(
                "{}: Accelerate keeps no position in the data; use skip_first_batches",
                object.name
            )),
            "custom" => left_out.push(format!(
                "{}: an object defined by the program, whose format Python cannot read",
                object.name
            )),
            _ => {}
        }
    }
    left_out.push(
        "the states of Python's and NumPy's random generators, which Brigade does not use: Accelerate's \
         load_state warns that it could not load all random states"
            .into(),
    );
    Ok(())
}

/// A scheduler of the checkpoint, and the optimizer whose learning rates it sets.
struct Scheduler<'c> {
    object: &'c Object,
    optimizer: Option<&'c Object>,
    torch: TorchScheduler,
}

fn schedulers(checkpoint: &Checkpoint, run: AccelerateRun) -> Result<Vec<Scheduler<'_>>, Error> {
    let manifest = checkpoint.manifest();
    let optimizers = manifest.of_kind("optimizer");
    let optimizers = optimizers.map(|object| Ok((object, read(checkpoint, object)?)));
    let optimizers = optimizers.collect::<Result<Vec<_>, Error>>()?;
    let number = |state: &Value<FileTensor>, key: &str| state.get(key).and_then(Value::as_float);
    let mut made = Vec::new();
    for (index, object) in manifest.of_kind("scheduler").enumerate() {
        let state = read(checkpoint, object)?;
        // Pairs schedulers and optimizers in the order in which they were prepared, unless learning rates disagree: a
        // scheduler has set its optimizer's rate.
        let same = |(_, optimizer): &&(_, Value<FileTensor>)| {
            number(optimizer, "lr") == number(&state, "lr")
        };
        let own = optimizers.get(index).filter(same);
        let own = own.or_else(|| optimizers.iter().find(same));
        let own = own.or_else(|| optimizers.get(index)).or_else(|| optimizers.first());
        let taken = own.and_then(|(_, optimizer)| optimizer.get("steps")?.as_int());
        let taken = taken.and_then(|steps| u64::try_from(steps).ok());
        let ranks = manifest.world_size;
        let steps = Steps {
            run: taken.unwrap_or(manifest.step),
            ranks: ranks as u64,
            stride: if run.split_batches { 1 } else { run.num_processes.unwrap_or(ranks) as u64 },
        };
        let torch = torch_scheduler::to_torch(&state, own.map(|(_, state)| state), steps);
        let torch = torch.map_err(|fact| Error::Unsupported {
            path: checkpoint.folder().to_owned(),
            fact: format!(
                "{} has no counterpart in torch.optim.lr_scheduler: {fact}; nothing was written. Without its \
                 states, the model goes to --to safetensors or --to torch",
                object.name
            ),
        })?;
        made.push(Scheduler { object, optimizer: own.map(|(object, _)| *object), torch });
    }
    Ok(made)
}

/// Returns the optimizer state for PyTorch, with the numbers that its scheduler reads from the parameter groups.
fn with_group_keys(
    state: Value<FileTensor>,
    keys: &[BTreeMap<&'static str, f64>],
) -> Value<FileTensor> {
    let Value::Dict(mut entries) = state else { return state };
    for (key, groups) in &mut entries {
        let (Some("param_groups"), Value::List(groups)) = (key.as_str(), groups) else { continue };
        for (group, keys) in groups.iter_mut().zip(keys) {
            let Value::Dict(numbers) = group else { continue };
            numbers.retain(|(key, _)| !key.as_str().is_some_and(|key| keys.contains_key(key)));
            let keys = keys.iter();
            numbers.extend(
                keys.map(|(key, number)| (Value::Str((*key).to_owned()), Value::Float(*number))),
            );
        }
    }
    Value::Dict(entries)
}

fn rank(
    checkpoint: &Checkpoint,
    object: &Object,
    number: &str,
    folder: &Path,
    left_out: &mut Vec<String>,
) -> Result<(), Error> {
    let state = read(checkpoint, object)?;
    let bytes = |key: &str| match state.get("random").and_then(|random| random.get(key)) {
        Some(Value::Bytes(bytes)) => Some(Value::Tensor(FileTensor::bytes(bytes))),
        _ => None,
    };
    let run = checkpoint.manifest().of_kind("run").next();
    let run = run.map(|run| read(checkpoint, run)).transpose()?;
    let position = run.as_ref().and_then(|run| run.get("accumulation_position")?.as_int());
    let mut states = vec![("step", Value::Int(position.unwrap_or_default()))];
    if let Some(state) = bytes("cpu") {
        states.push(("torch_manual_seed", state));
    }
    if let Some(state) = bytes("cuda") {
        states.push(("torch_cuda_manual_seed", Value::List(vec![state])));
    }
    if state.get("gradients").and_then(Value::as_dict).is_some_and(|all| !all.is_empty()) {
        left_out.push(format!(
            "{}: gradients within an accumulation window, which Accelerate does not keep",
            object.name
        ));
    }
    write_pth(&folder.join(format!("random_states_{number}.pkl")), &Value::dict(states))
}
