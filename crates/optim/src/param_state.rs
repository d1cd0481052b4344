//! What a rule keeps of each parameter between steps.

use brigade_torch::flat::same_layout;
use brigade_torch::{Device, Kind, NamedTensor, Tensor};

use crate::error::Result;
use crate::state::ParameterState;

/// The slots and the count of steps of each parameter, by its index: made when a parameter has its first
/// gradient, so that memory follows what is trained.
#[derive(Debug)]
pub(crate) struct ParamStates {
    names: Vec<&'static str>,
    params: Vec<ParamState>,
}

#[derive(Debug, Default)]
struct ParamState {
    steps: u64,
    /// As long as `names`, or empty before the first step.
    tensors: Vec<Option<Tensor>>,
}

impl ParamStates {
    pub(crate) fn new(names: Vec<&'static str>, count: usize) -> Self {
        Self { names, params: (0..count).map(|_| ParamState::default()).collect() }
    }

    /// The same, with nothing kept yet.
    pub(crate) fn none(&self) -> Self {
        Self::new(self.names.clone(), self.params.len())
    }

    /// Keeps those at the old indices in `from`, in this order; `None` is one that begins.
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

    pub(crate) fn count_up(&mut self, chosen: &[usize]) {
        for &index in chosen {
            self.params[index].steps += 1;
        }
    }

    /// Steps that this parameter has taken.
    pub(crate) fn steps(&self, index: usize) -> u64 {
        self.params[index].steps
    }

    pub(crate) fn has(&self, index: usize, slot: usize) -> bool {
        self.get(index, slot).is_some()
    }

    pub(crate) fn get(&self, index: usize, slot: usize) -> Option<&Tensor> {
        self.params[index].tensors.get(slot)?.as_ref()
    }

    /// One slot of several parameters. Those that lack it are left out.
    pub(crate) fn list(&self, chosen: &[usize], slot: usize) -> Vec<&Tensor> {
        chosen.iter().filter_map(|&index| self.get(index, slot)).collect()
    }

    /// Makes the slot with `first` where it is not there yet, and brings it to the parameter's layout
    /// where that has changed: another device, another memory format.
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

    /// Makes the slot of zeros in a shape of its own, and lets it follow the parameter to another device
    /// or kind.
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

    /// Under PyTorch's names: nothing before the parameter's first step.
    pub(crate) fn export(&self, index: usize, counts: bool) -> Result<Vec<(String, Tensor)>> {
        let ParamState { steps, tensors } = &self.params[index];
        let mut named = Vec::new();
        if counts && *steps > 0 {
            named.push((
                STEP.to_owned(),
                Tensor::f_from_slice(&[*steps as f32])?.f_reshape([0i64; 0])?,
            ));
        }
        for (name, tensor) in self.names.iter().zip(tensors) {
            if let Some(tensor) = tensor {
                named.push(((*name).to_owned(), tensor.shallow_clone()));
            }
        }
        Ok(named)
    }

    /// Copies a checked state in.
    pub(crate) fn import(
        &mut self,
        index: usize,
        parameter: &NamedTensor,
        found: &ParameterState,
        shape: impl Fn(usize, &[i64]) -> Option<Vec<i64>>,
    ) -> Result<()> {
        let parameter = parameter.tensor.f_detach()?;
        let size = parameter.size();
        for (name, values) in &found.tensors {
            if name == STEP {
                self.params[index].steps = values.f_double_value(&[])? as u64;
                continue;
            }
            let Some(slot) = self.names.iter().position(|known| known == name) else { continue };
            let mut made = match shape(slot, &size) {
                Some(shape) if shape != size => {
                    Tensor::f_zeros(&shape[..], (parameter.f_kind()?, parameter.device()))?
                }
                _ => like(&parameter, 0.0)?,
            };
            made.f_copy_(&values.f_detach()?)?;
            self.set(index, slot, made);
        }
        Ok(())
    }
}

/// Of the parameter's shape, kind, device and strides.
pub(crate) fn like(parameter: &Tensor, value: f64) -> Result<Tensor> {
    let parameter = parameter.f_detach()?;
    Ok(if value == 0.0 { parameter.f_zeros_like()? } else { parameter.f_full_like(value)? })
}

/// The count of steps of a parameter: in PyTorch a tensor of 32-bit floats.
pub(crate) const STEP: &str = "step";

/// The kind that PyTorch gives it.
pub(crate) const STEP_KIND: Kind = Kind::Float;
