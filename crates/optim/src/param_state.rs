//! What a rule keeps of each parameter between steps.

use brigade_models::NamedTensor;
use brigade_torch::flat::same_layout;
use brigade_torch::{Device, Kind, Tensor};

use super::state::ParameterState;
use crate::error::Result;

/// Named tensors and a count of steps by place, made when a parameter has its first gradient, so that
/// memory follows what is trained.
#[derive(Debug)]
pub(crate) struct Places {
    names: Vec<&'static str>,
    places: Vec<Place>,
}

#[derive(Debug, Default)]
struct Place {
    steps: u64,
    /// As long as `names`, or empty before the first step.
    tensors: Vec<Option<Tensor>>,
}

impl Places {
    pub(super) fn new(names: Vec<&'static str>, count: usize) -> Self {
        Self { names, places: (0..count).map(|_| Place::default()).collect() }
    }

    /// The same, with nothing kept yet.
    pub(super) fn none(&self) -> Self {
        Self::new(self.names.clone(), self.places.len())
    }

    pub(super) fn names(&self) -> &[&'static str] {
        &self.names
    }

    pub(super) fn count_up(&mut self, chosen: &[usize]) {
        for &place in chosen {
            self.places[place].steps += 1;
        }
    }

    /// Steps that this parameter has taken.
    pub(super) fn steps(&self, place: usize) -> u64 {
        self.places[place].steps
    }

    pub(super) fn has(&self, place: usize, slot: usize) -> bool {
        self.get(place, slot).is_some()
    }

    pub(super) fn get(&self, place: usize, slot: usize) -> Option<&Tensor> {
        self.places[place].tensors.get(slot)?.as_ref()
    }

    /// One slot of several parameters. Those that lack it are left out.
    pub(super) fn list(&self, chosen: &[usize], slot: usize) -> Vec<&Tensor> {
        chosen.iter().filter_map(|&place| self.get(place, slot)).collect()
    }

    /// Makes the slot with `first` where it is not there yet, and brings it to the parameter's layout
    /// where that has changed: another device, another memory format.
    pub(super) fn like(
        &mut self,
        place: usize,
        slot: usize,
        parameter: &Tensor,
        first: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        match self.get(place, slot) {
            Some(there) if same_layout(parameter, there)? => Ok(()),
            Some(there) => {
                let mut moved = like(parameter, 0.0)?;
                moved.f_copy_(there)?;
                self.set(place, slot, moved);
                Ok(())
            }
            None => {
                self.set(place, slot, first()?);
                Ok(())
            }
        }
    }

    /// Makes the slot of zeros in a shape of its own, and lets it follow the parameter to another device
    /// or kind.
    pub(super) fn shaped(
        &mut self,
        place: usize,
        slot: usize,
        shape: &[i64],
        (kind, device): (Kind, Device),
    ) -> Result<()> {
        let tensor = match self.get(place, slot) {
            Some(there) if there.device() == device && there.f_kind()? == kind => return Ok(()),
            Some(there) => there.f_to_device(device)?.f_to_kind(kind)?,
            None => Tensor::f_zeros(shape, (kind, device))?,
        };
        self.set(place, slot, tensor);
        Ok(())
    }

    pub(super) fn set(&mut self, place: usize, slot: usize, tensor: Tensor) {
        let tensors = &mut self.places[place].tensors;
        if tensors.is_empty() {
            tensors.resize_with(self.names.len(), || None);
        }
        tensors[slot] = Some(tensor);
    }

    /// Under PyTorch's names: nothing before the parameter's first step.
    pub(super) fn export(&self, place: usize, counts: bool) -> Result<Vec<(String, Tensor)>> {
        let Place { steps, tensors } = &self.places[place];
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
    pub(super) fn import(
        &mut self,
        place: usize,
        parameter: &NamedTensor,
        found: &ParameterState,
        shape: impl Fn(usize, &[i64]) -> Option<Vec<i64>>,
    ) -> Result<()> {
        let parameter = parameter.tensor.f_detach()?;
        let size = parameter.size();
        for (name, values) in &found.tensors {
            if name == STEP {
                self.places[place].steps = values.f_double_value(&[])? as u64;
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
            self.set(place, slot, made);
        }
        Ok(())
    }
}

/// Of the parameter's shape, kind, device and strides.
pub(super) fn like(parameter: &Tensor, value: f64) -> Result<Tensor> {
    let parameter = parameter.f_detach()?;
    Ok(if value == 0.0 { parameter.f_zeros_like()? } else { parameter.f_full_like(value)? })
}

/// The count of steps of a parameter: in PyTorch a tensor of 32-bit floats.
pub(super) const STEP: &str = "step";

/// The kind that PyTorch gives it.
pub(super) const STEP_KIND: Kind = Kind::Float;
