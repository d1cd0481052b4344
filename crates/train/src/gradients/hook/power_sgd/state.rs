//! What PowerSGD keeps from step to step, in state dictionaries and checkpoints: for each rank its own.

use brigade_checkpoint::{TensorInfo, Value};
use brigade_models::StateDict;
use brigade_torch::Tensor;

use super::{PowerSgdHook, State};
use crate::error::{Error, Result};

impl PowerSgdHook {
    pub(in super::super) fn state_dict(&self) -> Result<StateDict> {
        let state = self.lock();
        let mut out = StateDict::new();
        out.insert(ITERATION, Tensor::from(state.iteration as i64))?;
        for (kind, tensors) in [(ERROR, &state.errors), (FACTOR, &state.factors)] {
            for (place, tensor) in tensors {
                let name = &self.parameters[*place].name;
                out.insert(format!("{kind}.{name}"), tensor.f_detach_copy()?)?;
            }
        }
        Ok(out)
    }

    pub(in super::super) fn load_state_dict(&self, saved: &StateDict) -> Result<()> {
        let mut state = State::default();
        let mut counted = false;
        for (name, tensor) in saved.iter() {
            if name == ITERATION {
                counted = true;
                state.iteration = u64::try_from(tensor.f_int64_value(&[])?).unwrap_or(0);
                continue;
            }
            let (kind, parameter) = name.split_once('.').unwrap_or((name, ""));
            let place = self.parameters.iter().position(|known| known.name == parameter);
            let (Some(place), Some(tensors)) = (place, state.tensors(kind)) else {
                return Err(unknown(name));
            };
            if kind == ERROR {
                self.fits(place, &tensor.size()).map_err(Error::Misuse)?;
            }
            tensors.insert(place, tensor.f_detach_copy()?);
        }
        if !counted {
            return Err(unknown("no `iteration`"));
        }
        *self.lock() = state;
        Ok(())
    }

    /// For a checkpoint; the tensors share memory with the hook's.
    pub(crate) fn saved(&self) -> Result<Value<Tensor>> {
        let state = self.lock();
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

    /// Whether such a state is this model's.
    pub(crate) fn check_saved(&self, saved: &Value<TensorInfo>) -> Result<(), String> {
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

    /// Takes this rank's state. Those of all ranks of a run with another number of them become one: what
    /// they owe together stays the same. None of them is a run that begins.
    pub(crate) fn restore_saved(&self, states: &[&Value<Tensor>]) -> Result<()> {
        let mut restored = State::default();
        for (index, saved) in states.iter().enumerate() {
            for (place, error) in self.named(saved, ERROR).map_err(Error::Misuse)? {
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
            for (place, factor) in self.named(saved, FACTOR).map_err(Error::Misuse)? {
                restored.factors.insert(place, factor.f_detach_copy()?);
            }
        }
        *self.lock() = restored;
        Ok(())
    }

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

impl State {
    fn tensors(&mut self, kind: &str) -> Option<&mut std::collections::BTreeMap<usize, Tensor>> {
        match kind {
            ERROR => Some(&mut self.errors),
            FACTOR => Some(&mut self.factors),
            _ => None,
        }
    }
}

fn unknown(found: &str) -> Error {
    Error::Misuse(format!(
        "load_comm_hook_state: expected `iteration`, and `error.NAME` and `factor.NAME` of this model's \
         parameters, found {found:?}"
    ))
}

const ITERATION: &str = "iteration";
const ERROR: &str = "error";
const FACTOR: &str = "factor";
