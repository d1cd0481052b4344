//! An optimizer's state in a checkpoint, under PyTorch's names.

use std::collections::BTreeMap;
use std::sync::Mutex;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_models::weights::kind_of;
use brigade_torch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::optim::{Core, GroupState, OptimizerState, ParameterState, lock};
use crate::registry::{Kind, Restoring, Stateful};

impl Stateful for Mutex<Core> {
    fn kind(&self) -> Kind {
        Kind::Optimizer
    }

    fn state(&self) -> Result<Value<Tensor>> {
        let state = lock(self).state_dict()?;
        let groups = state.groups.into_iter().map(|group| {
            let numbers = group.numbers.into_iter().map(|(key, value)| (key, Value::Float(value)));
            let parameters = group.parameters.into_iter().map(Value::Str).collect();
            Value::dict([
                ("numbers", Value::dict(numbers)),
                ("parameters", Value::List(parameters)),
            ])
        });
        let order = state.parameters.iter().map(|parameter| Value::Str(parameter.name.clone()));
        let order = Value::List(order.collect());
        let parameters = state.parameters.into_iter().map(|parameter| {
            let tensors = parameter.tensors.into_iter();
            let tensors = tensors.map(|(name, tensor)| (name, Value::Tensor(tensor)));
            (parameter.name, Value::dict(tensors))
        });
        Ok(Value::dict([
            ("kind", Value::Str(state.kind)),
            ("steps", Value::Int(state.steps.cast_signed())),
            ("initial_lr", Value::Float(state.initial_lr)),
            ("lr", Value::Float(state.lr)),
            ("groups", Value::List(groups.collect())),
            // The model's: a JSON object has none.
            ("order", order),
            ("state", Value::dict(parameters)),
        ]))
    }

    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        // Stand-ins of the same shape, which take no memory.
        let stand_in = |info: TensorInfo| -> Result<Tensor> {
            let shape: Vec<i64> = info.shape.iter().map(|size| size.cast_signed()).collect();
            let one = Tensor::f_zeros([1], (kind_of(info.dtype), Device::Cpu))?;
            Ok(if shape.is_empty() { one.f_squeeze()? } else { one.f_expand(shape, false)? })
        };
        let state = state.clone().try_map(&mut |_, info| stand_in(info));
        let state = read(&state.map_err(|error| error.to_string())?)?;
        lock(self).fits(&state).map_err(|error| error.to_string())
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        let state = read(&state).map_err(Error::Misuse)?;
        lock(self).load_state_dict(&state)
    }

    fn steps(&self) -> Option<u64> {
        Some(lock(self).steps())
    }
}

fn read(state: &Value<Tensor>) -> Result<OptimizerState, String> {
    let needs = |what: &str| format!("an optimizer's state needs {what}");
    let float = |key: &str| state.get(key).and_then(Value::as_float).ok_or_else(|| needs(key));
    let kind = state.get("kind").and_then(Value::as_str).ok_or_else(|| needs("kind"))?;
    let steps = state.get("steps").and_then(Value::as_int).ok_or_else(|| needs("steps"))?;
    let names = |of: &Value<Tensor>, key: &str| -> Result<Vec<String>, String> {
        let names = of.get(key).and_then(Value::as_items).ok_or_else(|| needs(key))?;
        let names = names.iter().map(|name| name.as_str().map(str::to_owned));
        names.collect::<Option<_>>().ok_or_else(|| needs("names of parameters"))
    };
    let mut groups = Vec::new();
    for group in state.get("groups").and_then(Value::as_items).ok_or_else(|| needs("groups"))? {
        let mut numbers = BTreeMap::new();
        for (key, value) in group.get("numbers").and_then(Value::as_dict).unwrap_or_default() {
            let number = value.as_float().ok_or_else(|| needs("numbers in its groups"))?;
            numbers.insert(key.as_str().unwrap_or_default().to_owned(), number);
        }
        groups.push(GroupState { numbers, parameters: names(group, "parameters")? });
    }
    let all = state.get("state").ok_or_else(|| needs("state"))?;
    let mut parameters = Vec::new();
    for name in names(state, "order")? {
        let slots = all.get(&name).and_then(Value::as_dict);
        let slots = slots.ok_or_else(|| needs(&format!("the state of {name}")))?;
        let tensors = slots.iter().map(|(key, value)| {
            Some((key.as_str()?.to_owned(), value.as_tensor()?.shallow_clone()))
        });
        let tensors = tensors.collect::<Option<_>>().ok_or_else(|| needs("tensors"))?;
        parameters.push(ParameterState { name, tensors });
    }
    Ok(OptimizerState {
        kind: kind.to_owned(),
        steps: steps.cast_unsigned(),
        initial_lr: float("initial_lr")?,
        lr: float("lr")?,
        groups,
        parameters,
    })
}
