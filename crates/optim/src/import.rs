//! An optimizer's state as PyTorch saves it: `torch.save(optimizer.state_dict())`, and Accelerate's
//! `optimizer.bin`.
//!
//! Python's state names no parameters, but counts them over all groups: `{'state': {0: {'exp_avg': …}},
//! 'param_groups': [{'lr': …, 'params': [0, 1]}]}`. Since PyTorch 2.6 an optimizer made of
//! `named_parameters()` saves `param_names`, too, and then names decide.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use brigade_checkpoint::Value;
use brigade_checkpoint::pth::PthFile;
use brigade_models::weights::tensor_from_bytes;
use brigade_torch::Tensor;

use super::core::Core;
use super::places::STEP;
use super::state::{GroupState, OptimizerState, ParameterState, StateMismatch, group};
use super::{Optimizer, lock};
use crate::error::Result;

type Tree = Value<Tensor>;

impl Optimizer {
    /// Continues from a state that PyTorch has written for the same model:
    /// `torch.save(optimizer.state_dict(), path)`, or `optimizer.bin` of Accelerate. Nothing in the file
    /// is executed.
    ///
    /// The optimizer must be built as Python's was: the same kind and numbers, and the parameters in as
    /// many groups in the same order. Where the file has names (`param_names`, since PyTorch 2.6), they
    /// tell which parameter is which, else their order does.
    ///
    /// ```no_run
    /// # use brigade_models::{Cnn, Model};
    /// # use brigade_train::{Adam, Result};
    /// # fn f(model: &mut Model<Cnn>) -> Result<()> {
    /// model.load_weights("pytorch_model.bin")?;
    /// let mut optimizer = Adam::decoupled().lr(1e-3).build(model)?;
    /// optimizer.load_pytorch("optimizer.bin")?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`] when the file cannot be read; [`crate::Error::OptimizerState`] with
    /// the first difference: nothing was changed.
    pub fn load_pytorch(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let mut file = PthFile::open(path)?;
        let tree = file.value()?.try_map(&mut |_, stored| -> Result<Tensor> {
            let mut bytes = file.read_tensor(&stored)?;
            Ok(tensor_from_bytes(&mut bytes, &stored.size, stored.storage.dtype)?)
        })?;
        let mut core = lock(self.core());
        let state = convert(&core, &tree)?;
        core.load_state_dict(&state)
    }
}

/// PyTorch's state as ours, for this optimizer.
fn convert(core: &Core, tree: &Tree) -> Result<OptimizerState> {
    let (Some(state), Some(torch_groups)) = (
        tree.get("state").and_then(Value::as_dict),
        tree.get("param_groups").and_then(Value::as_items),
    ) else {
        return Err(layout("`state` and `param_groups`", tree).into());
    };
    if torch_groups.len() != core.groups.len() {
        return Err(StateMismatch::Groups {
            expected: core.groups.len(),
            found: torch_groups.len(),
        }
        .into());
    }
    let mut groups = Vec::new();
    let mut place_of = HashMap::new();
    for (index, torch_group) in torch_groups.iter().enumerate() {
        let expected = group(core, index);
        let names = names(index, torch_group, &expected, &mut place_of)?;
        groups.push(GroupState {
            numbers: numbers(torch_group, &expected.numbers, core.rule.momentum_name()),
            parameters: names,
        });
    }
    let by_name: HashMap<String, &Tree> = state
        .iter()
        .filter_map(|(key, value)| Some((place_of.get(&key.as_int()?)?.clone(), value)))
        .collect();
    let parameters = core.parameters.iter().map(|parameter| {
        let tensors =
            by_name.get(&parameter.name).map_or_else(|| Ok(Vec::new()), |s| tensors(s))?;
        Ok(ParameterState { name: parameter.name.clone(), tensors })
    });
    let parameters = parameters.collect::<Result<Vec<_>>>()?;
    Ok(OptimizerState {
        kind: core.rule.name().to_owned(),
        steps: steps(&parameters)?,
        initial_lr: base(core, &groups, "initial_lr"),
        lr: base(core, &groups, "lr"),
        groups,
        parameters,
    })
}

fn layout(expected: &str, found: &Tree) -> StateMismatch {
    StateMismatch::Layout { expected: expected.to_owned(), found: found.describe() }
}

/// The names of a group's parameters, in our order, and which of them each of Python's numbers is.
fn names(
    index: usize,
    torch_group: &Tree,
    expected: &GroupState,
    place_of: &mut HashMap<i64, String>,
) -> Result<Vec<String>> {
    let params = torch_group.get("params").and_then(Value::as_items);
    let params = params.ok_or_else(|| layout("a list `params` in each group", torch_group))?;
    let found: Vec<String> = match torch_group.get("param_names").and_then(Value::as_items) {
        Some(names) => {
            let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
            let wrapped = names.iter().all(|name| name.starts_with(WRAPPER))
                && !expected.parameters.iter().any(|name| name.starts_with(WRAPPER));
            let own = |name: &&str| if wrapped { &name[WRAPPER.len()..] } else { name }.to_owned();
            names.iter().map(own).collect()
        }
        None => expected.parameters.clone(),
    };
    if params.len() != expected.parameters.len() || found.len() != params.len() {
        return Err(StateMismatch::Sizes {
            group: index,
            expected: expected.parameters.len(),
            found: params.len(),
        }
        .into());
    }
    for (number, name) in params.iter().zip(&found) {
        let number = number.as_int().ok_or_else(|| layout("numbers in `params`", number))?;
        place_of.insert(number, name.clone());
    }
    // The order inside a group means nothing where there are names.
    let (mut sorted, mut ours) = (found.clone(), expected.parameters.clone());
    sorted.sort_unstable();
    ours.sort_unstable();
    Ok(if sorted == ours { expected.parameters.clone() } else { found })
}

/// Our numbers from Python's. Of those that a file does not have, ours are taken where older versions of
/// PyTorch lacked them, and 0 where PyTorch has no such thing.
fn numbers(
    torch_group: &Tree,
    expected: &BTreeMap<String, f64>,
    momentum_name: Option<&str>,
) -> BTreeMap<String, f64> {
    let item = |key: &str, index: usize| {
        torch_group.get(key).and_then(Value::as_items).and_then(|items| items.get(index))
    };
    let found = |name: &str| match name {
        "beta1" => item("betas", 0).and_then(number),
        "beta2" => item("betas", 1).and_then(number),
        "eps1" => item("eps", 0).and_then(number),
        "eps2" => item("eps", 1).and_then(number),
        "ns_coefficients_a" => item("ns_coefficients", 0).and_then(number),
        "ns_coefficients_b" => item("ns_coefficients", 1).and_then(number),
        "ns_coefficients_c" => item("ns_coefficients", 2).and_then(number),
        "match_rms_adamw" => {
            let rate = torch_group.get("adjust_lr_fn")?;
            Some(f64::from(u8::from(rate.as_str() == Some("match_rms_adamw"))))
        }
        "initial_lr" => {
            torch_group.get("initial_lr").or_else(|| torch_group.get("lr")).and_then(number)
        }
        _ => torch_group.get(name).and_then(number),
    };
    let mut numbers = BTreeMap::new();
    for (name, &ours) in expected {
        let moved = matches!(name.as_str(), "lr" | "initial_lr" | "weight_decay")
            || Some(name.as_str()) == momentum_name;
        let only_ours = match name.as_str() {
            // Adam and RAdam have it there, too.
            "decoupled_weight_decay" => !expected.contains_key("beta2"),
            name => OURS.contains(&name),
        };
        let missing = (!moved).then_some(if only_ours { 0.0 } else { ours });
        if let Some(value) = found(name).or(missing) {
            numbers.insert(name.clone(), value);
        }
    }
    if let Some(eps1) = found("eps1") {
        numbers.insert("eps1".to_owned(), eps1);
    }
    numbers
}

fn number(value: &Tree) -> Option<f64> {
    match value {
        Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
        Value::Tensor(tensor) if tensor.numel() == 1 => tensor.f_double_value(&[]).ok(),
        value => value.as_float(),
    }
}

/// `None` stands for a tensor that is not there (SGD's buffer without momentum); old versions counted
/// steps in plain numbers.
fn tensors(state: &Tree) -> Result<Vec<(String, Tensor)>> {
    let entries =
        state.as_dict().ok_or_else(|| layout("a dictionary for each parameter", state))?;
    let mut tensors = Vec::new();
    for (key, value) in entries {
        let name = key.as_str().ok_or_else(|| layout("names in a parameter's state", key))?;
        match value {
            Value::None => {}
            Value::Tensor(tensor) => tensors.push((name.to_owned(), tensor.shallow_clone())),
            value => {
                let value = number(value).ok_or_else(|| layout("tensors and numbers", value))?;
                tensors
                    .push((name.to_owned(), Tensor::f_from_slice(&[value])?.f_reshape([0i64; 0])?));
            }
        }
    }
    Ok(tensors)
}

/// PyTorch counts no steps of the optimizer: those of the parameter with the most.
fn steps(parameters: &[ParameterState]) -> Result<u64> {
    let mut most = 0;
    for (name, tensor) in parameters.iter().flat_map(|parameter| &parameter.tensors) {
        if name == STEP && tensor.numel() == 1 {
            most = most.max(tensor.f_double_value(&[])? as u64);
        }
    }
    Ok(most)
}

/// The optimizer's own rate, which Python's does not have: that of the first group, in our ratio.
fn base(core: &Core, groups: &[GroupState], name: &str) -> f64 {
    let (Some(found), Some(ours)) = (groups.first(), core.groups.first()) else {
        return core.initial_lr;
    };
    let found = found.numbers.get(name).copied().unwrap_or(core.initial_lr);
    if ours.initial_lr == core.initial_lr || ours.initial_lr == 0.0 {
        found
    } else {
        found * (core.initial_lr / ours.initial_lr)
    }
}

/// What DistributedDataParallel puts before every name.
const WRAPPER: &str = "module.";

/// Numbers that PyTorch does not have.
const OURS: [&str; 4] =
    ["eps_of_unbiased", "momentum_of_gradient", "lookahead_every", "lookahead_alpha"];
