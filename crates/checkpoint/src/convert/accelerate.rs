//! The layout of Accelerate's `save_state`.

use std::path::Path;

use super::weights::of_object;
use super::{FileTensor, Report, read, scaler, scheduler, write_pth, write_safetensors};
use crate::error::Error;
use crate::layout::{Checkpoint, Object};
use crate::torch_optimizer::to_torch;
use crate::value::Value;

pub(super) fn write(
    checkpoint: &Checkpoint,
    folder: &Path,
    report: &mut Report,
) -> Result<(), Error> {
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
                match to_torch(&state, left_out) {
                    Some(state) => write_pth(&numbered("optimizer", "bin"), &state)?,
                    None => left_out.push(format!("{}: its state is not understood", object.name)),
                }
            }
            "scheduler" => {
                let state = read(checkpoint, object)?;
                match scheduler::to_torch(&state) {
                    Some(state) => write_pth(&numbered("scheduler", "bin"), &state)?,
                    None => left_out.push(format!(
                        "{}: a schedule that watches a metric has no common form in PyTorch",
                        object.name
                    )),
                }
            }
            "scaler" => match scaler::to_torch(&read(checkpoint, object)?) {
                Some(state) => write_pth(&folder.join("scaler.pt"), &state)?,
                None => left_out.push(format!("{}: its state is not understood", object.name)),
            },
            "rank" => rank(checkpoint, object, number, folder, left_out)?,
            "loader" => left_out.push(format!(
                "{}: Accelerate keeps no position in the data; use skip_first_batches",
                object.name
            )),
            "custom" => left_out.push(format!(
                "{}: an object of the program's own, in no form that Python knows",
                object.name
            )),
            _ => {}
        }
    }
    left_out.push(
        "the states of Python's and NumPy's random generators, which Brigade does not use: \
         Accelerate's load_state says that it could not load all random states"
            .into(),
    );
    Ok(())
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
