//! Conversion of a schedule's position from PyTorch's scheduler state. `torch_scheduler.rs` converts the other way.

use super::FileTensor;
use super::foreign::Foreign;
use crate::value::Value;

/// Returns the position in a schedule, and the names of PyTorch's other entries: they define the schedule, which a
/// Brigade program sets itself.
pub(super) fn from_torch(
    theirs: &Value<FileTensor>,
    like: &Value<FileTensor>,
) -> Result<(Value<FileTensor>, Vec<String>), String> {
    let count = |key: &str| {
        let count = theirs.get(key).and_then(Value::as_int).filter(|count| *count >= 0);
        count.map(Value::Int).ok_or_else(|| format!("a schedule needs the count `{key}`"))
    };
    let position = count("last_epoch")?;
    let lr = theirs.get("_last_lr").and_then(Value::as_items).and_then(<[_]>::first);
    let lr = lr.and_then(number).or_else(|| like.get("lr").and_then(number));
    let lr = lr.map_or(Value::None, Value::Float);
    let mut taken = vec!["last_epoch", "_last_lr", "_step_count"];
    let plateau = match like.get("plateau") {
        None | Some(Value::None) => Value::None,
        Some(_) => {
            taken.extend(["best", "num_bad_epochs", "cooldown_counter"]);
            let best = theirs.get("best").and_then(number).filter(|best| best.is_finite());
            Value::dict([
                ("lr", lr.clone()),
                ("best", best.map_or(Value::None, Value::Float)),
                ("bad", count("num_bad_epochs")?),
                ("cooling", count("cooldown_counter")?),
                ("seen", position.clone()),
            ])
        }
    };
    let others = theirs.as_dict().unwrap_or_default().iter();
    let others = others.filter_map(|(key, _)| key.as_str()).filter(|key| !taken.contains(key));
    let others = others.filter(|key| !key.starts_with('_')).map(str::to_owned).collect();
    let definition = like.get("definition").cloned().unwrap_or(Value::None);
    let state =
        [("position", position), ("lr", lr), ("plateau", plateau), ("definition", definition)];
    Ok((Value::dict(state), others))
}

/// Converts a count of Accelerate's scheduler steps into optimizer steps.
///
/// Accelerate steps a schedule once per process at each optimizer step (unless `split_batches` is set or
/// `step_scheduler_with_optimizer=False`), so its count is that of the optimizer times the number of processes. Brigade
/// counts optimizer steps. The optimizers' own step counts decide if they have any. Otherwise, as with SGD,
/// Accelerate's default is assumed, and the message contains that. A checkpoint shows that the program counts as
/// Accelerate does (`step_per_process`) only if it was saved after the first step.
pub(super) fn in_our_steps(
    state: Value<FileTensor>,
    foreign: &Foreign,
    like_has_steps: bool,
) -> (Value<FileTensor>, Option<String>) {
    let ranks = if foreign.steps_per_process {
        foreign.random.len() as i64
    } else {
        // A Trainer steps a schedule once per optimizer step.
        1
    };
    let count = state.get("position").and_then(Value::as_int).filter(|count| *count > 0);
    let (Some(count), true) = (count, ranks > 1) else { return (state, None) };
    let steps: Vec<i64> =
        foreign.optimizers.iter().filter_map(|optimizer| steps(&optimizer.value)).collect();
    if steps.contains(&count) {
        return (state, None);
    }
    let folded = count % ranks == 0 && (steps.is_empty() || steps.contains(&(count / ranks)));
    if !folded {
        let fact = format!(
            "its count {count} is taken as it is: it is neither that of an optimizer's steps \
             ({steps:?}) nor {ranks} times it"
        );
        return (state, Some(fact));
    }
    let ours = count / ranks;
    let known = if steps.is_empty() { ", as it does by default" } else { "" };
    let unseen = if like_has_steps {
        ""
    } else {
        "; for a program with step_per_process(true), give a --like that was saved after its first step"
    };
    let fact = format!(
        "its count {count} became {ours} optimizer steps: Accelerate has stepped it once for each of \
         {ranks} processes{known}{unseen}"
    );
    let Value::Dict(entries) = state else { return (state, None) };
    let entries = entries.into_iter().map(|(key, value)| match (key.as_str(), &value) {
        (Some("position"), _) => (key, Value::Int(ours)),
        (Some("plateau"), Value::Dict(_)) => (key, seen(value, ours)),
        _ => (key, value),
    });
    (Value::Dict(entries.collect()), Some(fact))
}

fn seen(plateau: Value<FileTensor>, count: i64) -> Value<FileTensor> {
    let Value::Dict(entries) = plateau else { return plateau };
    let entries = entries.into_iter().map(|(key, value)| match key.as_str() {
        Some("seen") => (key, Value::Int(count)),
        _ => (key, value),
    });
    Value::Dict(entries.collect())
}

/// Returns the maximum step count of the parameters.
fn steps(optimizer: &Value<FileTensor>) -> Option<i64> {
    let states = optimizer.get("state").and_then(Value::as_dict).unwrap_or_default().iter();
    let steps = states.filter_map(|(_, state)| state.get("step").and_then(number));
    steps.map(|steps| steps as i64).max()
}

fn number(value: &Value<FileTensor>) -> Option<f64> {
    match value {
        Value::Tensor(tensor) => tensor.scalar(),
        value => value.as_float(),
    }
}
