//! An optimizer's state in a checkpoint.

use std::sync::Mutex;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::Tensor;

use crate::error::{Error, Result};
use crate::optim::{Core, GroupState, OptimizerState, ParameterState, lock};
use crate::registry::{Kind, Restoring, Stateful};

impl Stateful for Mutex<Core> {
    fn kind(&self) -> Kind {
        Kind::Optimizer
    }

    fn state(&self) -> Result<Value<Tensor>> {
        Ok(tree(lock(self).state_dict()?))
    }

    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let shape = |tensor: &TensorInfo| -> Vec<i64> {
            tensor.shape.iter().map(|size| size.cast_signed()).collect()
        };
        let state = read(state, TensorInfo::clone)?;
        state.check_shapes(&lock(self), &shape).map_err(|mismatch| mismatch.to_string())
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        lock(self).load_state_dict(&read(&state, Tensor::shallow_clone).map_err(Error::Misuse)?)
    }

    fn steps(&self) -> Option<u64> {
        Some(lock(self).steps())
    }
}

/// `{kind, steps, initial_lr, lr, groups: [{numbers, parameters}], parameters: [name], state: {name:
/// {slot: tensor}}}`: `parameters` has the model's order.
fn tree(state: OptimizerState) -> Value<Tensor> {
    let strings = |names: &[String]| Value::List(names.iter().cloned().map(Value::Str).collect());
    let groups = state.groups.iter().map(|group| {
        let numbers = group.numbers.iter().map(|(name, &number)| (name, Value::Float(number)));
        Value::dict([("numbers", Value::dict(numbers)), ("parameters", strings(&group.parameters))])
    });
    let groups = Value::List(groups.collect());
    let names: Vec<String> = state.parameters.iter().map(|p| p.name.clone()).collect();
    let slots = state.parameters.into_iter().map(|ParameterState { name, tensors }| {
        (name, Value::dict(tensors.into_iter().map(|(slot, tensor)| (slot, Value::Tensor(tensor)))))
    });
    Value::dict([
        ("kind", Value::Str(state.kind)),
        ("steps", Value::Int(state.steps.cast_signed())),
        ("initial_lr", Value::Float(state.initial_lr)),
        ("lr", Value::Float(state.lr)),
        ("groups", groups),
        ("parameters", strings(&names)),
        ("state", Value::dict(slots)),
    ])
}

fn read<T>(tree: &Value<T>, copy: impl Fn(&T) -> T) -> Result<OptimizerState<T>, String> {
    let lacks = |what: &str| format!("an optimizer's state needs {what}");
    let number = |key: &str| {
        tree.get(key).and_then(Value::as_float).ok_or_else(|| lacks(&format!("the number `{key}`")))
    };
    let groups = tree.get("groups").and_then(Value::as_items).unwrap_or_default().iter();
    let groups = groups.map(|group| {
        let numbers = group.get("numbers").and_then(Value::as_dict);
        let numbers = numbers.ok_or_else(|| lacks("`numbers` in each group"))?.iter();
        let numbers = numbers.map(|(name, number)| {
            let entry = name.as_str().map(str::to_owned).zip(number.as_float());
            entry.ok_or_else(|| lacks("names with numbers in `numbers`"))
        });
        Ok(GroupState {
            numbers: numbers.collect::<Result<_, String>>()?,
            parameters: strings(group.get("parameters"))
                .ok_or_else(|| lacks("names in each group"))?,
        })
    });
    let groups = groups.collect::<Result<_, String>>()?;
    let names = strings(tree.get("parameters")).ok_or_else(|| lacks("the list `parameters`"))?;
    let slots = tree.get("state").ok_or_else(|| lacks("the dictionary `state`"))?;
    let parameters = names.into_iter().map(|name| {
        let entries = slots.get(&name).and_then(Value::as_dict).unwrap_or_default().iter();
        let tensors = entries.map(|(slot, tensor)| {
            let entry = slot.as_str().map(str::to_owned).zip(tensor.as_tensor().map(&copy));
            entry.ok_or_else(|| lacks(&format!("names with tensors under `{name}`")))
        });
        Ok(ParameterState { tensors: tensors.collect::<Result<_, String>>()?, name })
    });
    let parameters = parameters.collect::<Result<_, String>>()?;
    let kind = tree.get("kind").and_then(Value::as_str).ok_or_else(|| lacks("its `kind`"))?;
    let steps = tree.get("steps").and_then(Value::as_int).and_then(|n| u64::try_from(n).ok());
    Ok(OptimizerState {
        kind: kind.to_owned(),
        steps: steps.ok_or_else(|| lacks("the count `steps`"))?,
        initial_lr: number("initial_lr")?,
        lr: number("lr")?,
        groups,
        parameters,
    })
}

fn strings<T>(list: Option<&Value<T>>) -> Option<Vec<String>> {
    list?.as_items()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}
