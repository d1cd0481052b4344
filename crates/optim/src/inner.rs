//! What an optimizer is made of, and its step.

use std::fmt;

use brigade_models::NamedTensor;
use brigade_torch::flat::look_ahead;
use brigade_torch::{Device, Tensor, clear_gradient, gradient};

use super::group::ParameterGroup;
use super::lookahead::Lookahead;
use super::places::{Places, STEP_KIND, like};
use super::state::{OptimizerState, StateMismatch};
use crate::error::{Error, Result};

/// A rule, the parameters in their groups, and their state.
///
/// Parameters are known by their place in the list. It lies behind a mutex, so that a schedule and a
/// checkpoint can reach it, too.
pub(crate) struct Core {
    pub(super) rule: Box<dyn Rule>,
    pub(super) parameters: Vec<NamedTensor>,
    pub(super) groups: Vec<ParameterGroup>,
    /// The places of each group's parameters.
    pub(super) members: Vec<Vec<usize>>,
    pub(super) places: Places,
    pub(super) lookahead: Option<Lookahead>,
    /// The learning rate that the optimizer was built with: what groups' own rates are relative to.
    pub(super) initial_lr: f64,
    pub(super) lr: f64,
    pub(super) steps: u64,
}

/// One optimizer's arithmetic. What it keeps between steps lies in [`Places`].
pub(crate) trait Rule: fmt::Debug + Send {
    /// The name of PyTorch's class, for the state.
    fn name(&self) -> &'static str;

    /// The names of the tensors that it keeps of each parameter, PyTorch's where it has the rule. They
    /// are addressed by their place in this list.
    fn slots(&self) -> &'static [&'static str];

    /// Whether each parameter's steps are counted.
    fn counts_steps(&self) -> bool;

    /// What PyTorch calls the number that a schedule's momentum sets.
    fn momentum_name(&self) -> Option<&'static str>;

    /// The numbers that are the same in all groups, under PyTorch's names; flags are 0 or 1.
    fn numbers(&self) -> Vec<(&'static str, f64)>;

    /// The shape of a slot for a parameter of this size; None where such a parameter has none.
    fn shape(&self, _slot: usize, size: &[i64]) -> Option<Vec<i64>> {
        Some(size.to_vec())
    }

    /// Whether it can step such a parameter.
    fn takes(&self, _name: &str, _size: &[i64]) -> Result<()> {
        Ok(())
    }

    /// Whether a parameter that has taken steps may still lack this slot.
    fn optional(&self, _slot: usize) -> bool {
        false
    }

    /// Steps the parameters of one group that have gradients.
    fn step(&self, step: &mut Step<'_>) -> Result<()>;
}

/// What one step does to one group.
#[derive(Debug)]
pub(crate) struct Step<'a> {
    /// Which parameters have a gradient.
    pub(super) chosen: &'a [usize],
    pub(super) parameters: &'a [&'a Tensor],
    pub(super) gradients: &'a [&'a Tensor],
    pub(super) places: &'a mut Places,
    pub(super) lr: f64,
    pub(super) momentum: f64,
    pub(super) weight_decay: f64,
}

/// What is kept of one parameter, while it is stepped.
#[derive(Debug)]
pub(crate) struct Kept<'a> {
    places: &'a Places,
    place: usize,
}

impl Kept<'_> {
    pub(super) fn get(&self, slot: usize) -> Option<&Tensor> {
        self.places.get(self.place, slot)
    }

    /// A slot that was filled before.
    pub(super) fn need(&self, slot: usize) -> Result<&Tensor> {
        self.get(slot).ok_or_else(|| {
            Error::Misuse(format!("slot {slot} of an optimizer's state was not made; report this"))
        })
    }

    /// Steps that the parameter has taken, this one included.
    pub(super) fn steps(&self) -> u64 {
        self.places.steps(self.place)
    }
}

impl Step<'_> {
    /// Makes the slot of each parameter, filled with zeros, where it is not there yet.
    pub(super) fn fill_missing(&mut self, slot: usize) -> Result<()> {
        self.fill_missing_with(slot, 0.0)
    }

    pub(super) fn fill_missing_with(&mut self, slot: usize, value: f64) -> Result<()> {
        for (&place, parameter) in self.chosen.iter().zip(self.parameters) {
            self.places.like(place, slot, parameter, || like(parameter, value))?;
        }
        Ok(())
    }

    /// As [`Step::fill_missing`], in the shape that each parameter's size asks for.
    pub(super) fn fill_missing_shaped(
        &mut self,
        slot: usize,
        shape: impl Fn(&[i64]) -> Option<Vec<i64>>,
    ) -> Result<()> {
        for (&place, parameter) in self.chosen.iter().zip(self.parameters) {
            let Some(shape) = shape(&parameter.size()) else { continue };
            let options = (parameter.f_kind()?, parameter.device());
            self.places.shaped(place, slot, &shape, options)?;
        }
        Ok(())
    }

    /// One slot of all parameters.
    pub(super) fn list(&self, slot: usize) -> Vec<&Tensor> {
        self.places.list(self.chosen, slot)
    }

    /// Steps one parameter after the other.
    pub(super) fn each(
        &self,
        run: impl Fn(&Tensor, &Tensor, &Kept<'_>) -> Result<()>,
    ) -> Result<()> {
        for (index, &place) in self.chosen.iter().enumerate() {
            let kept = Kept { places: self.places, place };
            run(self.parameters[index], self.gradients[index], &kept)?;
        }
        Ok(())
    }

    /// For libtorch's kernels: each parameter's count of steps as a scalar on its device. Counts are
    /// mostly equal, and so are their tensors.
    pub(super) fn step_tensors(&self) -> Result<Vec<Tensor>> {
        let mut made: Vec<(u64, Device, Tensor)> = Vec::new();
        let each = self.chosen.iter().zip(self.parameters).map(|(&place, parameter)| {
            let (steps, device) = (self.places.steps(place), parameter.device());
            if let Some((.., tensor)) = made.iter().find(|(s, d, _)| (*s, *d) == (steps, device)) {
                return Ok(tensor.shallow_clone());
            }
            let tensor = Tensor::f_full([0i64; 0], steps as f64, (STEP_KIND, device))?;
            made.push((steps, device, tensor.shallow_clone()));
            Ok(tensor)
        });
        each.collect()
    }
}

impl Core {
    /// All parameters.
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        self.parameters.iter().map(|parameter| &parameter.tensor).collect()
    }

    /// The parameters that have a gradient, by place, with it.
    pub(crate) fn gradients(&self) -> Result<Vec<(usize, Tensor)>> {
        let mut found = Vec::with_capacity(self.parameters.len());
        for (place, parameter) in self.parameters.iter().enumerate() {
            if let Some(gradient) = gradient(&parameter.tensor)? {
                found.push((place, gradient));
            }
        }
        Ok(found)
    }

    pub(crate) fn step(&mut self) -> Result<()> {
        let mut gradients: Vec<Option<Tensor>> = self.parameters.iter().map(|_| None).collect();
        for (place, gradient) in self.gradients()? {
            gradients[place] = Some(gradient);
        }
        for (group, members) in self.groups.iter().zip(&self.members) {
            let chosen: Vec<usize> =
                members.iter().copied().filter(|&place| gradients[place].is_some()).collect();
            if chosen.is_empty() {
                continue;
            }
            let parameters: Vec<&Tensor> =
                chosen.iter().map(|&place| &self.parameters[place].tensor).collect();
            let gradients: Vec<&Tensor> =
                chosen.iter().filter_map(|&place| gradients[place].as_ref()).collect();
            if self.lookahead.is_some() {
                let slow = self.rule.slots().len();
                for (&place, parameter) in chosen.iter().zip(&parameters) {
                    let copy = || {
                        let mut copy = like(parameter, 0.0)?;
                        copy.f_copy_(&parameter.f_detach()?)?;
                        Ok(copy)
                    };
                    self.places.like(place, slow, parameter, copy)?;
                }
            }
            if self.rule.counts_steps() {
                self.places.count_up(&chosen);
            }
            self.rule.step(&mut Step {
                chosen: &chosen,
                parameters: &parameters,
                gradients: &gradients,
                places: &mut self.places,
                lr: group.lr,
                momentum: group.momentum,
                weight_decay: group.weight_decay,
            })?;
        }
        self.steps += 1;
        self.look_ahead()
    }

    fn look_ahead(&self) -> Result<()> {
        let Some(Lookahead { every, alpha }) = self.lookahead else { return Ok(()) };
        if !self.steps.is_multiple_of(every) {
            return Ok(());
        }
        for (place, parameter) in self.parameters.iter().enumerate() {
            if let Some(slow) = self.places.get(place, self.rule.slots().len()) {
                look_ahead(&parameter.tensor, slow, alpha)?;
            }
        }
        Ok(())
    }

    pub(crate) fn zero_grad(&mut self) -> Result<()> {
        for parameter in &self.parameters {
            clear_gradient(&parameter.tensor)?;
        }
        Ok(())
    }

    /// What a schedule says: the groups' learning rates keep their first ratio to the optimizer's, as
    /// with PyTorch's schedulers; a momentum is for all groups.
    pub(crate) fn schedule(&mut self, lr: f64, momentum: Option<f64>) {
        self.lr = lr;
        for group in &mut self.groups {
            group.lr = if group.initial_lr == self.initial_lr {
                lr
            } else if self.initial_lr == 0.0 {
                // No ratio to keep.
                group.initial_lr
            } else {
                group.initial_lr * (lr / self.initial_lr)
            };
            if let Some(momentum) = momentum {
                group.momentum = momentum;
            }
        }
    }

    pub(crate) fn set_group_lr(&mut self, index: usize, lr: f64) -> Result<()> {
        let (count, factor) = (self.groups.len(), self.lr / self.initial_lr);
        let group = self.groups.get_mut(index).ok_or_else(|| {
            Error::Misuse(format!(
                "there is no parameter group {index}; this optimizer has {count}"
            ))
        })?;
        group.lr = lr;
        group.initial_lr = if factor.is_normal() { lr / factor } else { lr };
        Ok(())
    }

    pub(crate) fn lr(&self) -> f64 {
        self.lr
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    pub(crate) fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }

    /// The names of what is kept of each parameter.
    pub(super) fn slots(&self) -> &[&'static str] {
        self.places.names()
    }

    /// The shape of a slot for a parameter of this size.
    pub(super) fn shape(&self, slot: usize, size: &[i64]) -> Option<Vec<i64>> {
        if slot < self.rule.slots().len() {
            self.rule.shape(slot, size)
        } else {
            Some(size.to_vec())
        }
    }

    pub(super) fn is_optional(&self, slot: usize) -> bool {
        slot < self.rule.slots().len() && self.rule.optional(slot)
    }

    pub(crate) fn state_dict(&self) -> Result<OptimizerState> {
        OptimizerState::of(self)
    }

    /// Checks everything first; a mismatch changes nothing.
    pub(crate) fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        state.check(self)?;
        let mut places = self.places.none();
        for (place, (parameter, found)) in self.parameters.iter().zip(&state.parameters).enumerate()
        {
            places.import(place, parameter, found, |slot, size| self.shape(slot, size))?;
        }
        let momentum_name = self.rule.momentum_name();
        for (group, found) in self.groups.iter_mut().zip(&state.groups) {
            group.load(&found.numbers, momentum_name);
        }
        self.places = places;
        (self.initial_lr, self.lr) = (state.initial_lr, state.lr);
        self.steps = state.steps;
        Ok(())
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizer")
            .field("rule", &self.rule)
            .field("parameters", &self.parameters.len())
            .field("groups", &self.groups.len())
            .field("lr", &self.lr)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

impl From<StateMismatch> for Error {
    fn from(mismatch: StateMismatch) -> Self {
        Self::OptimizerState(mismatch)
    }
}
