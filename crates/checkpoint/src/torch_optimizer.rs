//! An optimizer's state under the names that `torch.optim` gives.

use std::collections::HashMap;

use super::FileTensor;
use crate::value::Value;

/// PyTorch counts parameters through the groups; Brigade names them. `None` where the tree is none of
/// Brigade's.
pub(super) fn to_torch(
    state: &Value<FileTensor>,
    left_out: &mut Vec<String>,
) -> Option<Value<FileTensor>> {
    let (mut groups, mut states, mut index) = (Vec::new(), Vec::new(), 0i64);
    for group in state.get("groups")?.as_items()? {
        let mut numbers = Vec::new();
        let of = |key: &str| group.get("numbers")?.get(key)?.as_float();
        for (key, value) in group.get("numbers")?.as_dict()? {
            let (key, value) = (key.as_str()?, value.as_float()?);
            match key {
                "beta1" | "beta2" => {}
                _ if key.starts_with("lookahead") => {
                    left_out.push(format!("{key} = {value}: torch.optim has no Lookahead"));
                }
                _ if FLAGS.contains(&key) => numbers.push((key, Value::Bool(value != 0.0))),
                _ => numbers.push((key, Value::Float(value))),
            }
        }
        if let (Some(first), Some(second)) = (of("beta1"), of("beta2")) {
            let betas = Value::Tuple(vec![Value::Float(first), Value::Float(second)]);
            numbers.push(("betas", betas));
        }
        let mut indices = Vec::new();
        for name in group.get("parameters")?.as_items()? {
            let slots = state.get("state").and_then(|all| all.get(name.as_str()?));
            let slots = slots.and_then(Value::as_dict).unwrap_or_default();
            if !slots.is_empty() {
                states.push((Value::Int(index), Value::Dict(slots.to_vec())));
            }
            indices.push(Value::Int(index));
            index += 1;
        }
        numbers.push(("params", Value::List(indices)));
        groups.push(Value::dict(numbers));
    }
    Some(Value::dict([("state", Value::Dict(states)), ("param_groups", Value::List(groups))]))
}

/// Numbers that are truth values in PyTorch.
const FLAGS: [&str; 12] = [
    "amsgrad",
    "nesterov",
    "maximize",
    "centered",
    "decoupled_weight_decay",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "scale_parameter",
    "relative_step",
    "warmup_init",
];

/// PyTorch's state for the optimizer whose state is `like`, and the steps it has taken.
///
/// The parameters must be in as many groups; where the file names them (`param_names`, since PyTorch 2.6)
/// the names decide, else their order.
pub(super) fn from_torch(
    theirs: &Value<FileTensor>,
    like: &Value<FileTensor>,
) -> Result<(Value<FileTensor>, u64), String> {
    let states = theirs.get("state").and_then(Value::as_dict);
    let groups = theirs.get("param_groups").and_then(Value::as_items);
    let (Some(states), Some(groups)) = (states, groups) else {
        return Err("it has no `state` and `param_groups`, as optimizers of PyTorch have".into());
    };
    let ours = like.get("groups").and_then(Value::as_items).unwrap_or_default();
    if groups.len() != ours.len() {
        return Err(format!(
            "it has {} parameter groups, the program's optimizer {}",
            groups.len(),
            ours.len()
        ));
    }
    let (mut made, mut name_of) = (Vec::new(), HashMap::new());
    for (index, (group, own)) in groups.iter().zip(ours).enumerate() {
        let fact = |fact: String| format!("group {index} {fact}");
        let own_names = strings(own.get("parameters")).unwrap_or_default();
        for (number, name) in names(group, &own_names).map_err(fact)? {
            name_of.insert(number, name);
        }
        let numbers = own.get("numbers").and_then(Value::as_dict).unwrap_or_default();
        let numbers = numbers.iter().map(|(key, own)| {
            let found = key.as_str().and_then(|key| number_of(group, key));
            (key.clone(), found.map_or_else(|| own.clone(), Value::Float))
        });
        made.push(Value::dict([
            ("numbers", Value::Dict(numbers.collect())),
            ("parameters", own.get("parameters").cloned().unwrap_or(Value::None)),
        ]));
    }
    let (mut steps, mut slots) = (0, Vec::new());
    for (number, state) in states {
        let number = number.as_int().ok_or("its `state` is not numbered")?;
        let name = name_of.get(&number);
        let name = name.ok_or_else(|| format!("parameter {number} is in none of its groups"))?;
        let entries = state.as_dict().ok_or_else(|| format!("parameter {number} has no slots"))?;
        let mut tensors = Vec::new();
        for (slot, value) in entries {
            let value = match value {
                // SGD's buffer without momentum.
                Value::None => continue,
                Value::Tensor(tensor) => tensor.clone(),
                // Steps were plain numbers once.
                value => FileTensor::number(value.as_float().ok_or_else(|| {
                    format!("parameter {number} has {} for a slot", value.describe())
                })? as f32),
            };
            if slot.as_str() == Some("step") {
                steps = steps.max(value.scalar().unwrap_or_default() as u64);
            }
            tensors.push((slot.clone(), Value::Tensor(value)));
        }
        slots.push((Value::Str(name.clone()), Value::Dict(tensors)));
    }
    let rate = |key: &str| rate(key, like, &made);
    let (initial_lr, lr) = (rate("initial_lr"), rate("lr"));
    let entries = like.as_dict().unwrap_or_default().iter().map(|(key, own)| {
        let value = match key.as_str() {
            Some("steps") => Value::Int(steps.cast_signed()),
            Some("groups") => Value::List(made.clone()),
            Some("state") => Value::Dict(slots.clone()),
            Some("initial_lr") => initial_lr.clone(),
            Some("lr") => lr.clone(),
            _ => own.clone(),
        };
        (key.clone(), value)
    });
    Ok((Value::Dict(entries.collect()), steps))
}

/// PyTorch's numbers of a group's parameters with our names.
fn names(group: &Value<FileTensor>, own: &[String]) -> Result<Vec<(i64, String)>, String> {
    let numbers = group.get("params").and_then(Value::as_items).ok_or("has no list `params`")?;
    let theirs = strings(group.get("param_names"));
    let theirs = theirs.map(|mut names| {
        let wrapped = names.iter().all(|name| name.starts_with(WRAPPER));
        if wrapped && !own.iter().any(|name| name.starts_with(WRAPPER)) {
            names.iter_mut().for_each(|name| drop(name.drain(..WRAPPER.len())));
        }
        names
    });
    let names = theirs.unwrap_or_else(|| own.to_vec());
    if numbers.len() != own.len() || names.len() != own.len() {
        return Err(format!(
            "has {} parameters, that of the program's optimizer {}",
            numbers.len(),
            own.len()
        ));
    }
    if let Some(name) = names.iter().find(|name| !own.contains(name)) {
        return Err(format!("has the parameter `{name}`, which that of the program has not"));
    }
    let number = |number: &Value<FileTensor>| {
        number.as_int().ok_or_else(|| "has a name in `params`".to_owned())
    };
    numbers.iter().map(number).zip(names).map(|(number, name)| Ok((number?, name))).collect()
}

/// A number of PyTorch's group under our name.
fn number_of(group: &Value<FileTensor>, key: &str) -> Option<f64> {
    let item = |list: &str, index: usize| group.get(list)?.as_items()?.get(index);
    let found = match key {
        "beta1" => item("betas", 0),
        "beta2" => item("betas", 1),
        "eps1" => item("eps", 0),
        "eps2" => item("eps", 1),
        "ns_coefficients_a" => item("ns_coefficients", 0),
        "ns_coefficients_b" => item("ns_coefficients", 1),
        "ns_coefficients_c" => item("ns_coefficients", 2),
        "match_rms_adamw" => {
            let rate = group.get("adjust_lr_fn")?.as_str();
            return Some(f64::from(u8::from(rate == Some("match_rms_adamw"))));
        }
        "initial_lr" => group.get("initial_lr").or_else(|| group.get("lr")),
        key => group.get(key),
    };
    match found? {
        Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
        Value::Tensor(tensor) => tensor.scalar(),
        value => value.as_float(),
    }
}

/// The optimizer's own rate, which PyTorch's has not: that of the first group, in the ratio that the two
/// have in `like`.
fn rate(key: &str, like: &Value<FileTensor>, made: &[Value<FileTensor>]) -> Value<FileTensor> {
    let of = |group: Option<&Value<FileTensor>>| group?.get("numbers")?.get(key)?.as_float();
    let own = like.get(key).and_then(Value::as_float);
    let before = of(like.get("groups").and_then(Value::as_items).and_then(<[_]>::first));
    let rate = match (of(made.first()), own, before) {
        (Some(found), Some(own), Some(before)) if own != before && before != 0.0 => {
            Some(found * (own / before))
        }
        (Some(found), _, _) => Some(found),
        (None, own, _) => own,
    };
    rate.map_or(Value::None, Value::Float)
}

fn strings(list: Option<&Value<FileTensor>>) -> Option<Vec<String>> {
    list?.as_items()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}

/// What DistributedDataParallel puts before every name.
const WRAPPER: &str = "module.";
