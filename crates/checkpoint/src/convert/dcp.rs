//! The layout of `torch.distributed.checkpoint`: models and optimizers under the names of PyTorch's `get_state_dict`.

use std::path::Path;

use super::weights::of_object;
use super::{FileTensor, Report, Weights, not_understood, read};
use crate::dcp::write_folder;
use crate::error::Error;
use crate::layout::Checkpoint;
use crate::pth::DcpKey;
use crate::torch_optimizer::to_torch_by_name;
use crate::value::Value;

type Entries = Vec<(Vec<DcpKey>, Value<FileTensor>)>;

/// Writes weights only, as one model.
pub(super) fn write_weights(folder: &Path, weights: &Weights) -> Result<(), Error> {
    let mut entries = Entries::new();
    put_weights(&mut entries, "model", weights.clone());
    write_folder(folder, &entries)
}

/// Writes the models and optimizers of a checkpoint.
pub(super) fn write(
    checkpoint: &Checkpoint,
    folder: &Path,
    report: &mut Report,
) -> Result<(), Error> {
    let mut entries = Entries::new();
    for object in &checkpoint.manifest().objects {
        let number = object.name.rsplit_once('_').map_or("", |(_, number)| number);
        let key = |stem: &str| match number {
            "" => stem.to_owned(),
            number => format!("{stem}_{number}"),
        };
        match object.kind.as_str() {
            "model" => put_weights(&mut entries, &key("model"), of_object(checkpoint, object)?),
            "optimizer" => {
                let state = read(checkpoint, object)?;
                let state = to_torch_by_name(&state, &mut report.left_out);
                let state = state.ok_or_else(|| not_understood(checkpoint, object))?;
                if state.get("state").and_then(Value::as_dict).is_some_and(<[_]>::is_empty) {
                    report.left_out.push(format!(
                        "{}: the optimizer has taken no step, so it has no states of parameters; \
                         dcp.load fails in a program that creates them before it loads",
                        object.name
                    ));
                }
                put(&mut entries, vec![DcpKey::Name(key("optim"))], state);
            }
            "run" => {}
            _ => report.left_out.push(format!(
                "{}: models and optimizers alone are written for torch.distributed.checkpoint",
                object.name
            )),
        }
    }
    write_folder(folder, &entries)
}

fn put_weights(entries: &mut Entries, key: &str, weights: Weights) {
    entries.extend(weights.into_iter().map(|(name, tensor)| {
        (vec![DcpKey::Name(key.to_owned()), DcpKey::Name(name)], Value::Tensor(tensor))
    }));
}

/// Flattens dictionaries, and lists of dictionaries, as `dcp.save` does.
fn put(entries: &mut Entries, keys: Vec<DcpKey>, value: Value<FileTensor>) {
    let below = |key: DcpKey| keys.iter().cloned().chain([key]).collect::<Vec<_>>();
    match value {
        Value::Dict(items) => {
            for (key, value) in items {
                let key = match key {
                    Value::Str(name) => name,
                    Value::Int(number) => number.to_string(),
                    other => other.describe().to_owned(),
                };
                put(entries, below(DcpKey::Name(key)), value);
            }
        }
        Value::List(items) if items.iter().any(|it| it.as_dict().is_some()) => {
            for (index, value) in (0..).zip(items) {
                put(entries, below(DcpKey::Index(index)), value);
            }
        }
        value => entries.push((keys, value)),
    }
}
