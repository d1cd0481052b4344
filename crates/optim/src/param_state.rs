//! State tensors that a rule keeps for each parameter between steps.

use std::collections::HashMap;

use crate::state::{ParameterState, STEP};
use brigade_torch::flat::same_layout;
use brigade_torch::{Error, NamedTensor, Result, TensorId};
use tch::{Device, Kind, Tensor};

/// Slots and step count of each parameter, by its index. They are created when a parameter has its first gradient, so
/// memory is used only for trained parameters.
#[derive(Debug)]
pub(crate) struct ParamStates {
    names: Vec<&'static str>,
    params: Vec<ParamState>,
}

#[derive(Debug, Default)]
struct ParamState {
    steps: u64,
    /// Step count on the parameter's device, once a step used device scalars: `steps` is outdated then. Parameters with
    /// equal counts share a tensor, which is incremented in place.
    count: Option<Tensor>,
    /// Tensors of the slots, as many as `names`. Empty before the first step.
    tensors: Vec<Option<Tensor>>,
}

impl ParamStates {
    pub(crate) fn new(names: Vec<&'static str>, count: usize) -> Self {
        Self { names, params: (0..count).map(|_| ParamState::default()).collect() }
    }

    /// Returns an empty state for the same slots and number of parameters.
    pub(crate) fn none(&self) -> Self {
        Self::new(self.names.clone(), self.params.len())
    }

    /// Keeps the states at the old indices in `from`, in this order. `None` means a new parameter.
    pub(crate) fn rearrange(&mut self, from: &[Option<usize>]) {
        let mut old: Vec<ParamState> = std::mem::take(&mut self.params);
        let kept = from.iter().map(|from| {
            from.and_then(|index| old.get_mut(index)).map(std::mem::take).unwrap_or_default()
        });
        self.params = kept.collect();
    }

    pub(crate) fn names(&self) -> &[&'static str] {
        &self.names
    }

    /// Counts a step of these parameters on the host. Waits for counts on devices.
    pub(crate) fn count_up(&mut self, chosen: &[usize]) -> Result<()> {
        self.fetch_counts()?;
        for &index in chosen {
            self.params[index].steps += 1;
        }
        Ok(())
    }

    /// Counts a step of these parameters on their devices, by `made`: 1, or 0 for a skipped step.
    pub(crate) fn count_up_on_device(
        &mut self,
        chosen: &[usize],
        parameters: &[&Tensor],
        made: &Tensor,
    ) -> Result<()> {
        let mut all: HashMap<TensorId, usize> = HashMap::new();
        for id in self.params.iter().filter_map(|param| param.count.as_ref().map(TensorId::of)) {
            *all.entry(id).or_default() += 1;
        }
        let mut ours: HashMap<TensorId, usize> = HashMap::new();
        for id in chosen.iter().filter_map(|&index| self.count(index).map(TensorId::of)) {
            *ours.entry(id).or_default() += 1;
        }
        // Key of a count before the step: its device, its tensor, and its value on the host.
        type Before = (Device, Option<TensorId>, u64);
        let mut counted: Vec<(Before, Tensor)> = Vec::new();
        for (&index, parameter) in chosen.iter().zip(parameters) {
            let (device, state) = (parameter.device(), &mut self.params[index]);
            let before = state.count.as_ref().map(TensorId::of);
            let key = (device, before, if before.is_some() { 0 } else { state.steps });
            if let Some((_, count)) = counted.iter().find(|(known, _)| *known == key) {
                state.count = Some(count.shallow_clone());
                continue;
            }
            let made = made.f_to_device(device)?;
            let count = match (&state.count, before) {
                (Some(count), Some(id))
                    if count.device() == device && all.get(&id) == ours.get(&id) =>
                {
                    count.shallow_clone().f_add_(&made)?
                }
                (Some(count), _) => count.f_to_device(device)?.f_add(&made)?,
                (None, _) => {
                    let steps = Tensor::f_full([0i64; 0], state.steps as f64, (STEP_KIND, device))?;
                    steps.f_add(&made)?
                }
            };
            state.count = Some(count.shallow_clone());
            counted.push((key, count));
        }
        Ok(())
    }

    /// Copies counts from devices to the host, and continues on the host. Waits for the devices.
    pub(crate) fn fetch_counts(&mut self) -> Result<()> {
        let mut fetched: HashMap<TensorId, u64> = HashMap::new();
        for param in &mut self.params {
            let Some(count) = param.count.take() else { continue };
            param.steps = match fetched.get(&TensorId::of(&count)) {
                Some(&steps) => steps,
                None => count.f_double_value(&[])? as u64,
            };
            fetched.insert(TensorId::of(&count), param.steps);
        }
        Ok(())
    }

    /// Returns the number of steps of this parameter, if it is counted on the host.
    pub(crate) fn steps(&self, index: usize) -> u64 {
        self.params[index].steps
    }

    /// Returns the number of steps of this parameter, if it is counted on its device.
    pub(crate) fn count(&self, index: usize) -> Option<&Tensor> {
        self.params[index].count.as_ref()
    }

    pub(crate) fn has(&self, index: usize, slot: usize) -> bool {
        self.get(index, slot).is_some()
    }

    pub(crate) fn get(&self, index: usize, slot: usize) -> Option<&Tensor> {
        self.params[index].tensors.get(slot)?.as_ref()
    }

    /// Returns one slot of several parameters. Parameters without it are omitted.
    pub(crate) fn list(&self, chosen: &[usize], slot: usize) -> Vec<&Tensor> {
        chosen.iter().filter_map(|&index| self.get(index, slot)).collect()
    }

    /// Creates the slot with the value `first` if it does not exist, and converts it to the parameter's layout if that
    /// has changed (another device or memory format).
    pub(crate) fn fill_like(
        &mut self,
        index: usize,
        slot: usize,
        parameter: &Tensor,
        first: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        match self.get(index, slot) {
            Some(there) if same_layout(parameter, there)? => Ok(()),
            Some(there) => {
                let mut moved = like(parameter, 0.0)?;
                moved.f_copy_(there)?;
                self.set(index, slot, moved);
                Ok(())
            }
            None => {
                self.set(index, slot, first()?);
                Ok(())
            }
        }
    }

    /// Creates a slot of zeros in a shape of its own, and moves it with the parameter to another device or type.
    pub(crate) fn fill_shaped(
        &mut self,
        index: usize,
        slot: usize,
        shape: &[i64],
        (kind, device): (Kind, Device),
    ) -> Result<()> {
        let tensor = match self.get(index, slot) {
            Some(there) if there.device() == device && there.f_kind()? == kind => return Ok(()),
            Some(there) => there.f_to_device(device)?.f_to_kind(kind)?,
            None => Tensor::f_zeros(shape, (kind, device))?,
        };
        self.set(index, slot, tensor);
        Ok(())
    }

    pub(crate) fn set(&mut self, index: usize, slot: usize, tensor: Tensor) {
        let tensors = &mut self.params[index].tensors;
        if tensors.is_empty() {
            tensors.resize_with(self.names.len(), || None);
        }
        tensors[slot] = Some(tensor);
    }

    /// Returns a parameter's state under PyTorch's names. Empty before the parameter's first step.
    pub(crate) fn export(&self, index: usize, counts: bool) -> Result<Vec<(String, Tensor)>> {
        let ParamState { steps, count, tensors } = &self.params[index];
        let mut named = Vec::new();
        let steps = match count {
            Some(count) => count.f_double_value(&[])? as f32,
            None => *steps as f32,
        };
        if counts && (steps > 0.0 || tensors.iter().any(Option::is_some)) {
            named.push((STEP.to_owned(), Tensor::f_from_slice(&[steps])?.f_reshape([0i64; 0])?));
        }
        for (name, tensor) in self.names.iter().zip(tensors) {
            if let Some(tensor) = tensor {
                named.push(((*name).to_owned(), tensor.shallow_clone()));
            }
        }
        Ok(named)
    }

    /// Loads a checked state: copies of its values, or with `adopt` its own tensors if they have the required form.
    pub(crate) fn import(
        &mut self,
        index: usize,
        parameter: &NamedTensor,
        found: &ParameterState,
        adopt: bool,
        shape: impl Fn(usize, &[i64]) -> Option<Vec<i64>>,
    ) -> Result<()> {
        let parameter = parameter.tensor.f_detach()?;
        let size = parameter.size();
        // At least one, if the state does not contain the count: rules may check if a step is the first.
        self.params[index].steps = u64::from(!found.tensors.is_empty());
        for (name, values) in &found.tensors {
            if name == STEP {
                self.params[index].steps = values.f_double_value(&[])? as u64;
                continue;
            }
            let Some(slot) = self.names.iter().position(|known| known == name) else { continue };
            let values = values.f_detach()?;
            let mut made = match shape(slot, &size) {
                Some(shape) if shape != size => {
                    Tensor::f_empty(&shape[..], (parameter.f_kind()?, parameter.device()))?
                }
                _ => parameter.f_empty_like()?,
            };
            let form = |it: &Tensor| Ok::<_, Error>((it.f_kind()?, it.device(), it.stride()));
            if adopt && form(&values)? == form(&made)? {
                made = values;
            } else {
                made.f_copy_(&values)?;
            }
            self.set(index, slot, made);
        }
        Ok(())
    }
}

/// Returns a tensor of this value with the parameter's shape, type, device and strides.
pub(crate) fn like(parameter: &Tensor, value: f64) -> Result<Tensor> {
    let parameter = parameter.f_detach()?;
    Ok(if value == 0.0 { parameter.f_zeros_like()? } else { parameter.f_full_like(value)? })
}

/// Element type of PyTorch's step counts.
pub(crate) const STEP_KIND: Kind = Kind::Float;
