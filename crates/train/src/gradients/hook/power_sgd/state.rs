//! State of PowerSGD between steps, in state dictionaries and checkpoints. Each rank has its own.

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::Result;
use tch::Tensor;

use super::{PowerSgdHook, State};
use crate::gradients::hook::StatefulHook;
use crate::stateful::{Stateful, mismatch};

impl Stateful for PowerSgdHook {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let state = self.state.lock();
        let named = |tensors: &std::collections::BTreeMap<usize, Tensor>| {
            let named = tensors.iter().map(|(place, tensor)| {
                let name = self.parameters[*place].name.clone();
                (name, Value::Tensor(tensor.shallow_clone()))
            });
            Value::dict(named.collect::<Vec<_>>())
        };
        Ok(Value::dict([
            (ITERATION, Value::Int(state.iteration as i64)),
            (ERROR, named(&state.errors)),
            (FACTOR, named(&state.factors)),
        ]))
    }

    fn check_state_dict(&self, saved: &Value<TensorInfo>) -> Result<(), String> {
        if saved.get(ITERATION).and_then(Value::as_int).is_none() {
            return Err(format!("PowerSGD's state needs the integer `{ITERATION}`"));
        }
        for kind in [ERROR, FACTOR] {
            for (place, info) in self.named(saved, kind)? {
                let size: Vec<i64> = info.shape.iter().map(|&size| size as i64).collect();
                if kind == ERROR {
                    self.fits(place, &size)?;
                }
            }
        }
        Ok(())
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.load_from_ranks(&[state])
    }
}

impl StatefulHook for PowerSgdHook {
    /// Joins the states of all ranks of a run with another number of ranks; the sum of their compression errors stays
    /// the same. An empty list starts a new state.
    fn load_from_ranks(&self, states: &[&Value<Tensor>]) -> Result<()> {
        let mut restored = State::default();
        for (index, saved) in states.iter().enumerate() {
            for (place, error) in self.named(saved, ERROR).map_err(mismatch)? {
                let share = match states.len() {
                    1 => error.f_detach_copy()?,
                    ranks => error.f_div_scalar(ranks as f64)?,
                };
                let sum = match restored.errors.get(&place) {
                    Some(before) => before.f_add(&share)?,
                    None => share,
                };
                restored.errors.insert(place, sum);
            }
            if index > 0 {
                continue;
            }
            // The same on all ranks.
            let iteration = saved.get(ITERATION).and_then(Value::as_int).unwrap_or(0);
            restored.iteration = u64::try_from(iteration).unwrap_or(0);
            for (place, factor) in self.named(saved, FACTOR).map_err(mismatch)? {
                restored.factors.insert(place, factor.f_detach_copy()?);
            }
        }
        *self.state.lock() = restored;
        Ok(())
    }

    /// Loads the state, without the errors of parameters that are frozen now.
    fn carry_over(&self, state: &Value<Tensor>) -> Result<()> {
        let known = |kind: &str| {
            let entries = state.get(kind).and_then(Value::as_dict).unwrap_or_default().iter();
            let kept = entries.filter_map(|(name, tensor)| {
                let name = name.as_str()?;
                self.parameters.iter().find(|parameter| parameter.name == name)?;
                Some((name, Value::Tensor(tensor.as_tensor()?.shallow_clone())))
            });
            Value::dict(kept.collect::<Vec<_>>())
        };
        let iteration = state.get(ITERATION).and_then(Value::as_int).unwrap_or(0);
        let carried = Value::dict([
            (ITERATION, Value::Int(iteration)),
            (ERROR, known(ERROR)),
            (FACTOR, known(FACTOR)),
        ]);
        self.load_state_dict(&carried)
    }

    /// Discards the factors, so that the next step begins with new ones.
    fn reset(&self) {
        let mut state = self.state.lock();
        state.errors.clear();
        state.factors.clear();
        state.underway.clear();
    }
}

impl PowerSgdHook {
    fn named<'s, T>(&self, saved: &'s Value<T>, kind: &str) -> Result<Vec<(usize, &'s T)>, String> {
        let entries = saved.get(kind).and_then(Value::as_dict).unwrap_or_default();
        let place = |(name, tensor): &'s (Value<T>, Value<T>)| {
            let name = name.as_str().unwrap_or_default();
            let place = self.parameters.iter().position(|known| known.name == name);
            place.zip(tensor.as_tensor()).ok_or_else(|| {
                format!("it has PowerSGD's {kind} of `{name}`, which is not trained here")
            })
        };
        entries.iter().map(place).collect()
    }

    fn fits(&self, place: usize, size: &[i64]) -> Result<(), String> {
        let parameter = &self.parameters[place];
        let expected = [parameter.n, parameter.m];
        if size == expected {
            return Ok(());
        }
        Err(format!(
            "PowerSGD's error of `{}` is {size:?}, but its gradient is {expected:?} as a matrix",
            parameter.name
        ))
    }
}

const ITERATION: &str = "iteration";
const ERROR: &str = "error";
const FACTOR: &str = "factor";
