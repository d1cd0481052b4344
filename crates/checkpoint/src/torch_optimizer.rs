//! Optimizer states in PyTorch's form: `torch.save(optimizer.state_dict())`, and Accelerate's `optimizer.bin`.
//!
//! PyTorch numbers the parameters across all groups: `{'state': {0: {'exp_avg': ...}}, 'param_groups': [{'lr': ...,
//! 'params': [0, 1]}]}`. Brigade names them: `{kind, steps, initial_lr, lr, groups: [{numbers, parameters}],
//! parameters: [name], state: {name: {slot: tensor}}}`. Since PyTorch 2.6, an optimizer made of `named_parameters()`
//! also saves `param_names`, which are then matched by name, and otherwise by order. The states of
//! `torch.distributed.checkpoint.state_dict` have names instead of numbers.

mod by_number;

use std::collections::HashMap;

use brigade_rank_env::text::counted;

use crate::value::Value;
use crate::wrapper_prefix::{prefixes_around, wrapper_prefix};

/// A tensor of an optimizer state, in memory or in a file.
pub trait StateTensor: Clone {
    /// Returns the value of a tensor with exactly one element. `None` for others.
    fn scalar(&self) -> Option<f64>;

    /// Creates a tensor of one number, without dimensions.
    fn from_scalar(number: f64) -> Self;
}

/// An error of loading PyTorch's state: the first difference from the optimizer that it is for.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TorchStateError {
    /// The value does not have the structure of an optimizer's state.
    #[error("it is not an optimizer's state: expected {expected}, found {found}")]
    Layout {
        /// Structure that PyTorch writes at this place.
        expected: String,
        /// Structure in the file.
        found: String,
    },
    /// The number of parameter groups differs.
    #[error("it has {found} parameter groups, but the program's optimizer has {expected}")]
    Groups {
        /// Number of groups of the program's optimizer.
        expected: usize,
        /// Number of groups in the file.
        found: usize,
    },
    /// The number of parameters in a group differs.
    #[error(
        "group {group} has {}, but that group of the program's optimizer has {expected}",
        counted(found, "parameter")
    )]
    Sizes {
        /// Index of the parameter group.
        group: usize,
        /// Number of parameters of this group of the program's optimizer.
        expected: usize,
        /// Number of parameters of this group in the file.
        found: usize,
    },
    /// The names of parameters in a group differ.
    #[error(
        "parameter {index} of group {group} is `{found}`, but `{expected}` in the program's optimizer"
    )]
    Parameter {
        /// Index of the parameter group.
        group: usize,
        /// Index of the first difference in the group.
        index: usize,
        /// Name of the parameter in the program's optimizer.
        expected: String,
        /// Name of the parameter in the file.
        found: String,
    },
    /// A parameter of the program's optimizer is missing.
    #[error("it has no parameter `{name}`, which is in group {group} of the program's optimizer")]
    Absent {
        /// Index of the parameter group.
        group: usize,
        /// Name of the parameter.
        name: String,
    },
    /// The state has a parameter that the program's optimizer does not have.
    #[error("it has a parameter `{name}`, which the program's optimizer does not have")]
    Unknown {
        /// Name of the parameter.
        name: String,
    },
    /// Parameters of one group have different hyperparameters in the state.
    #[error(
        "`{key}` of the parameter `{name}` differs from that of the other parameters in group {group} of \
         the program's optimizer; build the optimizer with the same groups as in the run that saved the \
         state"
    )]
    Differs {
        /// Index of the parameter group.
        group: usize,
        /// Name of the parameter.
        name: String,
        /// Name of the hyperparameter.
        key: String,
    },
    /// The state lacks a hyperparameter that every optimizer of this kind has.
    #[error("group {group} has no `{name}`: the state belongs to another kind of optimizer")]
    Missing {
        /// Index of the parameter group.
        group: usize,
        /// Name of the hyperparameter.
        name: String,
    },
}

/// Converts an optimizer state into PyTorch's form. `None` if it is not in Brigade's form. Hyperparameters that
/// `torch.optim` does not have are added to `left_out`, one message each.
pub fn to_torch<T: Clone>(state: &Value<T>, left_out: &mut Vec<String>) -> Option<Value<T>> {
    let (mut groups, mut states, mut index) = (Vec::new(), Vec::new(), 0i64);
    for group in state.get("groups")?.as_items()? {
        let mut numbers = Vec::new();
        let of = |key: &str| group.get("numbers")?.get(key)?.as_float();
        for (key, value) in group.get("numbers")?.as_dict()? {
            let (key, value) = (key.as_str()?, value.as_float()?);
            match key {
                "beta1" | "beta2" | "eps1" | "eps2" => {}
                _ if key.starts_with("ns_coefficients_") => {}
                "ns_steps" => numbers.push((key, Value::Int(value as i64))),
                "match_rms_adamw" => {
                    let rate = if value == 0.0 { Value::None } else { Value::Str(key.to_owned()) };
                    numbers.push(("adjust_lr_fn", rate));
                }
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
        if let Some(second) = of("eps2") {
            let first = of("eps1").map_or(Value::None, Value::Float);
            numbers.push(("eps", Value::Tuple(vec![first, Value::Float(second)])));
        }
        let coefficients = ["a", "b", "c"].map(|it| of(&format!("ns_coefficients_{it}")));
        if let [Some(a), Some(b), Some(c)] = coefficients {
            let all = [a, b, c].map(Value::Float).into();
            numbers.push(("ns_coefficients", Value::Tuple(all)));
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

/// Converts an optimizer state into the form of PyTorch's `get_optimizer_state_dict`: like [`to_torch`], but under the
/// names of the parameters, and with the settings besides hyperparameters that `torch.optim` has for an optimizer of
/// this kind. `None` if it is not in Brigade's form.
pub fn to_torch_by_name<T: Clone>(
    state: &Value<T>,
    left_out: &mut Vec<String>,
) -> Option<Value<T>> {
    let made = to_torch(state, left_out)?;
    let kind = state.get("kind").and_then(Value::as_str).unwrap_or_default();
    let settings = SETTINGS.iter().find(|(known, _)| *known == kind).map_or(&[][..], |it| it.1);
    by_number::named(made, state, settings)
}

/// Settings of parameter groups in `torch.optim` besides hyperparameters, by optimizer.
const SETTINGS: [(&str, &[&str]); 7] = [
    ("Adam", &["foreach", "capturable", "differentiable", "fused"]),
    ("AdamW", &["foreach", "capturable", "differentiable", "fused"]),
    ("SGD", &["foreach", "differentiable", "fused"]),
    ("RMSprop", &["foreach", "capturable", "differentiable"]),
    ("RAdam", &["foreach", "capturable", "differentiable"]),
    ("Adagrad", &["foreach", "differentiable", "fused"]),
    ("Adafactor", &["foreach"]),
];

/// Numbers that are booleans in PyTorch.
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

/// Converts PyTorch's state into the form of the optimizer whose state is `like`. Also returns the number of steps
/// taken: the maximum over the parameters.
///
/// # Errors
/// Fails with a [`TorchStateError`] for the first difference.
pub fn from_torch<T: StateTensor>(
    theirs: &Value<T>,
    like: &Value<T>,
) -> Result<(Value<T>, u64), TorchStateError> {
    let numbered = by_number::numbered(theirs, like)?;
    let theirs = numbered.as_ref().unwrap_or(theirs);
    let states = theirs.get("state").and_then(Value::as_dict);
    let groups = theirs.get("param_groups").and_then(Value::as_items);
    let (Some(states), Some(groups)) = (states, groups) else {
        return Err(layout("`state` and `param_groups`", theirs));
    };
    let ours = like.get("groups").and_then(Value::as_items).unwrap_or_default();
    if groups.len() != ours.len() {
        return Err(TorchStateError::Groups { expected: ours.len(), found: groups.len() });
    }
    let (mut made, mut name_of) = (Vec::new(), HashMap::new());
    for (index, (group, own)) in groups.iter().zip(ours).enumerate() {
        let own_names = strings(own.get("parameters")).unwrap_or_default();
        name_of.extend(names(index, group, &own_names)?);
        made.push(Value::dict([
            ("numbers", numbers(index, group, own.get("numbers"))?),
            ("parameters", own.get("parameters").cloned().unwrap_or(Value::None)),
        ]));
    }
    let (mut steps, mut slots) = (0, Vec::new());
    for (number, state) in states {
        let name = number.as_int().and_then(|number| name_of.get(&number));
        let name = name.ok_or_else(|| layout("the numbers of `params` in `state`", number))?;
        let entries =
            state.as_dict().ok_or_else(|| layout("a dictionary for each parameter", state))?;
        let mut tensors = Vec::new();
        for (slot, value) in entries {
            if slot.as_str().is_none() {
                return Err(layout("names in a parameter's state", slot));
            }
            let value = match value {
                // SGD without momentum has no buffer.
                Value::None => continue,
                Value::Tensor(tensor) => tensor.clone(),
                // Old versions stored steps as plain numbers.
                value => T::from_scalar(
                    number_of(value).ok_or_else(|| layout("tensors and numbers", value))?,
                ),
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

fn layout<T>(expected: &str, found: &Value<T>) -> TorchStateError {
    TorchStateError::Layout { expected: expected.to_owned(), found: found.describe().to_owned() }
}

/// Returns PyTorch's numbers of a group's parameters, with Brigade's names.
fn names<T>(
    index: usize,
    group: &Value<T>,
    own: &[String],
) -> Result<Vec<(i64, String)>, TorchStateError> {
    let params = group.get("params").and_then(Value::as_items);
    let params = params.ok_or_else(|| layout("a list `params` in each group", group))?;
    let theirs = strings(group.get("param_names")).map(|mut names| {
        let prefix = own_prefix(&names, own);
        names.iter_mut().for_each(|name| drop(name.drain(..prefix.len())));
        names
    });
    let names = theirs.unwrap_or_else(|| own.to_vec());
    if params.len() != own.len() || names.len() != own.len() {
        let (expected, found) = (own.len(), params.len());
        return Err(TorchStateError::Sizes { group: index, expected, found });
    }
    // With names, the order inside a group is irrelevant.
    if names.iter().any(|name| !own.contains(name)) {
        let differing = names.iter().zip(own).enumerate().find(|(_, (found, own))| found != own);
        if let Some((place, (found, expected))) = differing {
            return Err(TorchStateError::Parameter {
                group: index,
                index: place,
                expected: expected.clone(),
                found: found.clone(),
            });
        }
    }
    let number =
        |number: &Value<T>| number.as_int().ok_or_else(|| layout("numbers in `params`", number));
    params.iter().map(number).zip(names).map(|(number, name)| Ok((number?, name))).collect()
}

/// Returns the prefix of PyTorch's names before Brigade's.
fn own_prefix(names: &[String], own: &[String]) -> String {
    let prefix = wrapper_prefix(names, own);
    let is_own = |name: &str| own.iter().any(|own| own == name);
    if !prefix.is_empty() || names.len() != own.len() || names.iter().any(|name| is_own(name)) {
        return prefix;
    }
    let fits = |prefix: &String| {
        names.iter().all(|name| name.strip_prefix(prefix.as_str()).is_some_and(is_own))
    };
    prefixes_around(names, own).into_iter().find(fits).unwrap_or_default()
}

/// Returns a group's hyperparameters under Brigade's names. For one that a file lacks, keeps the program's value if
/// older versions of PyTorch lacked it, and takes 0 if PyTorch does not have it.
fn numbers<T: StateTensor>(
    index: usize,
    group: &Value<T>,
    own: Option<&Value<T>>,
) -> Result<Value<T>, TorchStateError> {
    let own = own.and_then(Value::as_dict).unwrap_or_default();
    let has = |name: &str| own.iter().any(|(key, _)| key.as_str() == Some(name));
    let mut made = Vec::with_capacity(own.len());
    for (key, ours) in own {
        let name = key.as_str().unwrap_or_default();
        let only_ours = match name {
            // Adam and RAdam have it in PyTorch, too.
            "decoupled_weight_decay" => !has("beta2"),
            name => OURS.contains(&name),
        };
        let value = match hyperparameter(group, name) {
            Some(found) => Value::Float(found),
            None if MOVED.contains(&name) => {
                let name = name.to_owned();
                return Err(TorchStateError::Missing { group: index, name });
            }
            None if only_ours => Value::Float(0.0),
            None => ours.clone(),
        };
        made.push((key.clone(), value));
    }
    if let Some(eps1) = hyperparameter(group, "eps1").filter(|_| !has("eps1")) {
        made.push((Value::Str("eps1".to_owned()), Value::Float(eps1)));
    }
    Ok(Value::Dict(made))
}

/// Returns a hyperparameter of PyTorch's group by Brigade's name.
fn hyperparameter<T: StateTensor>(group: &Value<T>, key: &str) -> Option<f64> {
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
    number_of(found?)
}

fn number_of<T: StateTensor>(value: &Value<T>) -> Option<f64> {
    match value {
        Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
        Value::Tensor(tensor) => tensor.scalar(),
        value => value.as_float(),
    }
}

/// Returns the optimizer's own rate, which PyTorch's does not have: that of the first group, with the ratio of the two
/// in `like`.
fn rate<T>(key: &str, like: &Value<T>, made: &[Value<T>]) -> Value<T> {
    let of = |group: Option<&Value<T>>, key: &str| group?.get("numbers")?.get(key)?.as_float();
    let first = like.get("groups").and_then(Value::as_items).and_then(<[_]>::first);
    let own = like.get("initial_lr").and_then(Value::as_float);
    let rate = match (of(made.first(), key), own, of(first, "initial_lr")) {
        (Some(found), Some(own), Some(before)) if own != before && before != 0.0 => {
            Some(found * (own / before))
        }
        (Some(found), _, _) => Some(found),
        (None, own, _) => own,
    };
    rate.map_or(Value::None, Value::Float)
}

fn strings<T>(list: Option<&Value<T>>) -> Option<Vec<String>> {
    list?.as_items()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}

/// Hyperparameters that a schedule or the program changes: every optimizer that has them saves them.
const MOVED: [&str; 5] = ["lr", "initial_lr", "weight_decay", "momentum", "beta1"];

/// Hyperparameters that only Brigade has.
const OURS: [&str; 4] =
    ["eps_of_unbiased", "momentum_of_gradient", "lookahead_every", "lookahead_alpha"];
