//! The content of an optimizer, and its step.

mod state;

use std::collections::{HashMap, HashSet};
use std::fmt;

use brigade_torch::flat::look_ahead;
use brigade_torch::{
    DeviceNumbers, Error, NamedTensor, ProcessGroup, Result, TensorId, clear_gradient, gradient,
};
use tch::{Kind, Tensor};

use crate::device_scalars::DeviceScalars;
use crate::group::ParameterGroup;
use crate::lookahead::{Lookahead, SLOW};
use crate::options::{Grouping, Options};
use crate::param_state::{ParamStates, like};
use crate::parts::StepParts;
use crate::rule::{GroupStep, Rule, ShardedStep};
use crate::shards::{Shards, spread_slots};

/// A rule, the parameters in their groups, and their states.
///
/// Parameters are identified by their index in the list. The value is behind a mutex, because schedulers and
/// checkpoints share it.
pub(crate) struct OptimizerInner {
    pub(crate) rule: Box<dyn Rule>,
    /// Options that the optimizer was built with, for the groups of other parameters.
    options: Options,
    momentum: f64,
    /// All parameters that the optimizer has had, including those that are frozen now.
    known: Vec<NamedTensor>,
    pub(crate) parameters: Vec<NamedTensor>,
    pub(crate) groups: Vec<ParameterGroup>,
    /// Indices of each group's parameters.
    members: Vec<Vec<usize>>,
    /// For each group its index among the options' groups, and whether it is the half that is exempt from weight decay.
    keys: Vec<(usize, bool)>,
    pub(crate) states: ParamStates,
    pub(crate) lookahead: Option<Lookahead>,
    /// Ranks and whole shapes, if some parameters are this rank's rows of larger ones.
    shards: Option<Shards>,
    /// Parts of a step, if it has several.
    pub(crate) parts: Option<StepParts>,
    /// Learning rate that the optimizer was built with. The groups' own rates are relative to it.
    pub(crate) initial_lr: f64,
    pub(crate) lr: f64,
    steps: u64,
    /// Number of requested steps, including those that a device has skipped.
    launched: u64,
    /// Number of steps as a scalar on a device, once a step used device scalars: `steps` is outdated then.
    count: Option<Tensor>,
}

impl OptimizerInner {
    pub(crate) fn new(
        rule: Box<dyn Rule>,
        options: Options,
        momentum: f64,
        parameters: Vec<NamedTensor>,
        Grouping { groups, members, keys }: Grouping,
    ) -> Self {
        let lookahead = options.lookahead;
        let slots = rule.slots().iter().copied().chain(lookahead.map(|_| SLOW)).collect();
        let states = ParamStates::new(slots, parameters.len());
        let (initial_lr, lr) = (options.lr, options.lr);
        Self {
            rule,
            options,
            momentum,
            known: parameters.iter().map(handle).collect(),
            parameters,
            groups,
            members,
            keys,
            states,
            lookahead,
            shards: None,
            parts: None,
            initial_lr,
            lr,
            steps: 0,
            launched: 0,
            count: None,
        }
    }

    /// Returns all parameters.
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        self.parameters.iter().map(|parameter| &parameter.tensor).collect()
    }

    /// Returns the parameters with a gradient, by index, with their gradients.
    pub(crate) fn gradients(&self) -> Result<Vec<(usize, Tensor)>> {
        let mut found = Vec::with_capacity(self.parameters.len());
        for (index, parameter) in self.parameters.iter().enumerate() {
            if let Some(gradient) = gradient(&parameter.tensor)? {
                found.push((index, gradient));
            }
        }
        Ok(found)
    }

    pub(crate) fn launched(&self) -> u64 {
        self.launched
    }

    pub(crate) fn count_launched(&mut self, steps: i64) {
        self.launched = self.launched.saturating_add_signed(steps);
    }

    /// Returns the number of steps. Waits for a count on a device.
    pub(crate) fn steps(&self) -> Result<u64> {
        match &self.count {
            Some(count) => Ok(count.f_double_value(&[])? as u64),
            None => Ok(self.steps),
        }
    }

    /// Counts a step on a device. Returns 1 if the step is made, otherwise 0.
    fn count_on_device(&mut self, scalars: &DeviceScalars<'_>) -> Result<Tensor> {
        let device = self.parameters[0].tensor.device();
        let made = match scalars.found_inf {
            Some(found) => {
                let found = found.f_to_device(device)?.f_reshape([0i64; 0])?;
                found.f_eq(0)?.f_to_kind(Kind::Float)?
            }
            None => Tensor::f_ones([0i64; 0], (Kind::Float, device))?,
        };
        match &self.count {
            // In place: a recorded step reads it at the same address.
            Some(count) if count.device() == device => {
                let _ = count.shallow_clone().f_add_(&made)?;
            }
            Some(count) => self.count = Some(count.f_to_device(device)?.f_add(&made)?),
            None => {
                let steps = Tensor::f_full([0i64; 0], self.steps as f64, (Kind::Float, device))?;
                self.count = Some(steps.f_add(&made)?);
            }
        }
        Ok(made)
    }

    /// Returns the learning rate of a group on a device, if there is one.
    fn rate_on_device(&self, group: usize, lr: &Tensor) -> Result<Option<Tensor>> {
        let (own, base) = (self.groups[group].initial_lr, self.initial_lr);
        match lr.numel() {
            1 if own == base => Ok(Some(lr.f_reshape([0i64; 0])?)),
            // A base of 0 has no ratio.
            1 if base == 0.0 => Ok(None),
            1 => Ok(Some(lr.f_reshape([0i64; 0])?.f_mul_scalar(own / base)?)),
            _ => Ok(Some(lr.f_select(0, group as i64)?)),
        }
    }

    fn check_scalars(&self, scalars: &DeviceScalars<'_>) -> Result<()> {
        let DeviceScalars { lr, grad_scale, found_inf } = *scalars;
        for (what, tensor) in [("the scale of gradients", grad_scale), ("found_inf", found_inf)] {
            if let Some(tensor) = tensor.filter(|tensor| tensor.numel() != 1) {
                return Err(Error::invalid_argument(format!(
                    "{what} has shape {:?}; expected one number",
                    tensor.size()
                )));
            }
        }
        if !scalars.is_empty() && !self.takes_device_scalars() {
            return Err(Error::invalid_argument(format!(
                "{} takes no numbers from a device{}: implement `Rule::takes_device_scalars`, or call \
                 `Optimizer::step`",
                self.rule.name(),
                if self.rule.takes_device_scalars() { " with sharded parameters" } else { "" }
            )));
        }
        let fits = |lr: &&Tensor| lr.numel() == 1 || lr.size() == [self.groups.len() as i64];
        match lr.filter(|lr| !fits(lr)) {
            Some(lr) => Err(Error::invalid_argument(format!(
                "the learning rate on the device has shape {:?}; expected one number, or one for each of \
                 {} groups",
                lr.size(),
                self.groups.len()
            ))),
            None => Ok(()),
        }
    }

    pub(crate) fn step(&mut self, scalars: &DeviceScalars<'_>) -> Result<()> {
        self.check_rates()?;
        let _without_autograd = tch::no_grad_guard();
        self.check_scalars(scalars)?;
        let on_device = !scalars.is_empty() && !self.parameters.is_empty();
        let mut gradients: Vec<Option<Tensor>> = self.parameters.iter().map(|_| None).collect();
        for (index, gradient) in self.gradients()? {
            gradients[index] = Some(gradient);
        }
        let mut made = None;
        if on_device {
            made = Some(self.count_on_device(scalars)?);
        } else {
            self.steps = self.steps()?;
            self.count = None;
        }
        let mut groups = Vec::with_capacity(self.groups.len());
        for (index, (group, members)) in self.groups.iter().zip(&self.members).enumerate() {
            let chosen: Vec<usize> =
                members.iter().copied().filter(|&index| gradients[index].is_some()).collect();
            if chosen.is_empty() {
                continue;
            }
            let parameters: Vec<&Tensor> =
                chosen.iter().map(|&index| &self.parameters[index].tensor).collect();
            let gradients: Vec<&Tensor> =
                chosen.iter().filter_map(|&index| gradients[index].as_ref()).collect();
            if self.lookahead.is_some() {
                let slow = self.rule.slots().len();
                for (&index, parameter) in chosen.iter().zip(&parameters) {
                    let copy = || {
                        let mut copy = like(parameter, 0.0)?;
                        copy.f_copy_(&parameter.f_detach()?)?;
                        Ok(copy)
                    };
                    self.states.fill_like(index, slow, parameter, copy)?;
                }
            }
            match &made {
                Some(made) => self.states.count_up_on_device(&chosen, &parameters, made)?,
                None => self.states.count_up(&chosen)?,
            }
            let lr_on_device = match scalars.lr {
                Some(lr) => self.rate_on_device(index, lr)?,
                None => None,
            };
            groups.push(GroupStep {
                chosen,
                parameters,
                gradients,
                lr: group.lr,
                momentum: group.momentum,
                weight_decay: group.weight_decay,
                lr_on_device,
            });
        }
        let counts = self.rule.counts_steps();
        match self.shards.as_ref().filter(|_| !self.rule.is_elementwise()) {
            Some(shards) => {
                let states = &mut self.states;
                self.rule.step_shards(&mut ShardedStep {
                    shards,
                    groups: &groups,
                    states,
                    counts,
                })?;
            }
            None => {
                let mut step = |group: &GroupStep<'_>| {
                    let device = DeviceNumbers {
                        lr: group.lr_on_device.as_ref(),
                        steps: None,
                        grad_scale: scalars.grad_scale,
                        found_inf: scalars.found_inf,
                    };
                    self.rule.step(&mut group.step(&mut self.states, counts, on_device, device))
                };
                // Lookahead writes into all parameters after the step.
                let in_parts = self.rule.is_elementwise() && self.lookahead.is_none();
                match self.parts.as_mut().filter(|_| in_parts) {
                    Some(parts) => parts.step(&groups, step)?,
                    None => groups.iter().try_for_each(&mut step)?,
                }
            }
        }
        drop(groups);
        if made.is_none() {
            self.steps += 1;
        }
        self.launched += 1;
        self.look_ahead(scalars)
    }

    /// Checks the learning rates and momenta: a user's schedule may return any number, and an invalid one must not
    /// change the weights.
    fn check_rates(&self) -> Result<()> {
        let bad = |number: f64| !number.is_finite() || number < 0.0;
        match self.groups.iter().position(|group| bad(group.lr) || bad(group.momentum)) {
            None => Ok(()),
            Some(index) => Err(Error::invalid_argument(format!(
                "step {} was not made: group {index} has the learning rate {} and the momentum {}, \
                 expected finite numbers from 0; look at the schedule",
                self.steps, self.groups[index].lr, self.groups[index].momentum
            ))),
        }
    }

    fn look_ahead(&self, scalars: &DeviceScalars<'_>) -> Result<()> {
        let Some(Lookahead { every, alpha }) = self.lookahead else { return Ok(()) };
        // With a count on a device, the device decides.
        if self.count.is_none() && !self.steps.is_multiple_of(every) {
            return Ok(());
        }
        let slot = self.rule.slots().len();
        let weights = self.parameters.iter().enumerate().filter_map(|(index, parameter)| {
            self.states.get(index, slot).map(|slow| (&parameter.tensor, slow))
        });
        let (fast, slow): (Vec<&Tensor>, Vec<&Tensor>) = weights.unzip();
        let device = DeviceNumbers {
            steps: self.count.as_ref(),
            found_inf: scalars.found_inf,
            ..DeviceNumbers::default()
        };
        look_ahead(&fast, &slow, alpha, every, &device)
    }

    pub(crate) fn zero_grad(&mut self) -> Result<()> {
        for parameter in &self.parameters {
            clear_gradient(&parameter.tensor)?;
        }
        Ok(())
    }

    /// Sets the learning rate and momentum of a schedule. The groups' learning rates keep their initial ratio to the
    /// optimizer's, as with PyTorch's schedulers; a momentum applies to all groups.
    pub(crate) fn schedule(&mut self, lr: f64, momentum: Option<f64>) {
        self.lr = lr;
        for group in &mut self.groups {
            group.lr = scheduled(group.initial_lr, self.initial_lr, lr);
            if let Some(momentum) = momentum {
                group.momentum = momentum;
            }
        }
    }

    /// Sets the values of all groups' schedules; the first is the optimizer's own.
    pub(crate) fn schedule_groups(&mut self, rates: &[(f64, Option<f64>)]) {
        if let Some((lr, _)) = rates.first() {
            self.lr = *lr;
        }
        for (group, (key, _)) in self.groups.iter_mut().zip(&self.keys) {
            if let Some((lr, momentum)) = rates.get(*key) {
                group.lr = *lr;
                group.momentum = momentum.unwrap_or(group.momentum);
            }
        }
    }

    /// Returns the number of groups that can have schedules of their own: those of the options, and the remaining
    /// parameters.
    pub(crate) fn schedulable_groups(&self) -> usize {
        self.options.groups.len() + 1
    }

    pub(crate) fn group(&mut self, index: usize) -> Result<&mut ParameterGroup> {
        let count = self.groups.len();
        self.groups.get_mut(index).ok_or_else(|| {
            Error::invalid_argument(format!(
                "there is no parameter group {index}; this optimizer has {count}"
            ))
        })
    }

    pub(crate) fn set_group_lr(&mut self, index: usize, lr: f64) -> Result<()> {
        let factor = self.lr / self.initial_lr;
        let group = self.group(index)?;
        group.lr = lr;
        group.initial_lr = if factor.is_normal() { lr / factor } else { lr };
        Ok(())
    }

    /// Returns `true` if it steps, or has stepped, one of these parameters.
    pub(crate) fn concerns(&self, model: &[NamedTensor]) -> bool {
        self.known.iter().any(|known| model.iter().any(|parameter| same(known, parameter)))
    }

    /// Returns `true` if steps can use scalars on a device.
    pub(crate) fn takes_device_scalars(&self) -> bool {
        let over_shards = self.shards.is_some() && !self.rule.is_elementwise();
        self.rule.takes_device_scalars() && !over_shards
    }

    /// Returns the slots of a parameter of this size whose rows are divided over ranks as the parameter's, with their
    /// shapes.
    pub(crate) fn spread_slots(&self, size: &[i64]) -> Vec<(&'static str, Vec<i64>)> {
        spread_slots(self.states.names(), |slot, size| self.slot_shape(slot, size), size)
    }

    pub(crate) fn replace_with_shards(
        &mut self,
        shards: &[(&Tensor, &Tensor)],
        group: &ProcessGroup,
    ) -> Result<bool> {
        let shard_of: HashMap<TensorId, &Tensor> =
            shards.iter().map(|(whole, shard)| (TensorId::of(whole), *shard)).collect();
        let known: HashSet<TensorId> =
            self.known.iter().map(|known| TensorId::of(&known.tensor)).collect();
        let is_known = |tensor: &Tensor| known.contains(&TensorId::of(tensor));
        let replaces = shards.iter().any(|(whole, _)| is_known(whole));
        if !replaces && !shards.iter().any(|(_, shard)| is_known(shard)) {
            return Ok(false);
        }
        if !self.rule.steps_shards() {
            return Err(Error::invalid_argument(format!(
                "{} cannot step the shards of a model: an element's step may depend on other elements of its parameter; \
                 implement `Rule::is_elementwise`, or `Rule::steps_shards` and `Rule::step_shards`, use an optimizer such as \
                 AdamW, or train without sharding",
                self.rule.name()
            )));
        }
        // A single rank has all rows. A parameter that is frozen now may be stepped later.
        let spread = shards.iter().filter(|(whole, _)| group.size() > 1 && whole.dim() > 0);
        let is_new = |shard: &Tensor| {
            self.shards.as_ref().is_none_or(|shards| shards.whole_shape(shard).is_none())
        };
        let had_no_sums =
            !self.rule.is_elementwise() && spread.clone().any(|(_, shard)| is_new(shard));
        if (replaces || had_no_sums) && (self.launched > 0 || self.steps()? > 0) {
            return Err(Error::invalid_argument(format!(
                "the optimizer has made {} steps with whole parameters and cannot step shards: prepare it before its \
                 first step, and load its state after `prepare`",
                self.steps()?
            )));
        }
        for parameter in self.known.iter_mut().chain(&mut self.parameters) {
            if let Some(shard) = shard_of.get(&TensorId::of(&parameter.tensor)) {
                parameter.tensor = shard.shallow_clone();
            }
        }
        for (whole, shard) in spread {
            self.shards.get_or_insert_with(|| Shards::new(group)).add(shard, whole.size());
        }
        Ok(true)
    }

    /// Returns all parameters that the optimizer would have after `model`'s trained parameters have become those of
    /// `trained`, and which of them it would step.
    fn would_step(
        &self,
        model: &[NamedTensor],
        trained: &dyn Fn(&NamedTensor) -> bool,
    ) -> Vec<(NamedTensor, bool)> {
        let mut merged = Vec::new();
        let mut models_turn = true;
        for known in &self.known {
            if !model.iter().any(|parameter| same(known, parameter)) {
                merged.push((handle(known), known.tensor.requires_grad()));
            } else if std::mem::take(&mut models_turn) {
                for parameter in model {
                    match self.known.iter().find(|known| same(known, parameter)) {
                        Some(known) => merged.push((handle(known), trained(parameter))),
                        None if trained(parameter) && self.options.selects(&parameter.name) => {
                            merged.push((handle(parameter), true));
                        }
                        None => {}
                    }
                }
            }
        }
        merged
    }

    /// Checks that the optimizer could step those parameters of `model` that `trained` selects.
    pub(crate) fn check_trained(
        &self,
        model: &[NamedTensor],
        trained: &dyn Fn(&NamedTensor) -> bool,
    ) -> Result<()> {
        let mut stepped = self.would_step(model, trained).into_iter().filter(|(_, steps)| *steps);
        stepped.try_for_each(|(parameter, _)| {
            self.rule.check_parameter(&parameter.name, &parameter.tensor.size())
        })
    }

    /// Steps those of `model`'s parameters that `trained` selects, from now on. Parameters that remain keep their
    /// state, the state of removed ones is dropped. Groups keep their learning rates, momenta and weight decays; an
    /// added group follows the schedule.
    pub(crate) fn set_trained(
        &mut self,
        model: &[NamedTensor],
        trained: &dyn Fn(&NamedTensor) -> bool,
    ) {
        let merged = self.would_step(model, trained);
        let stepped = merged.iter().filter(|(_, steps)| *steps);
        let parameters: Vec<NamedTensor> =
            stepped.map(|(parameter, _)| handle(parameter)).collect();
        let from: Vec<Option<usize>> = parameters
            .iter()
            .map(|parameter| self.parameters.iter().position(|old| same(old, parameter)))
            .collect();
        self.states.rearrange(&from);
        let mut grouping = self.options.grouping(self.momentum, &parameters);
        for (group, key) in grouping.groups.iter_mut().zip(&grouping.keys) {
            match self.keys.iter().position(|known| known == key) {
                Some(index) => {
                    let ParameterGroup { initial_lr, lr, weight_decay, momentum, exempt, .. } =
                        self.groups[index];
                    *group = ParameterGroup {
                        names: std::mem::take(&mut group.names),
                        initial_lr,
                        lr,
                        weight_decay,
                        momentum,
                        exempt,
                    };
                }
                None => group.lr = scheduled(group.initial_lr, self.initial_lr, self.lr),
            }
        }
        self.known = merged.into_iter().map(|(parameter, _)| parameter).collect();
        self.parameters = parameters;
        (self.groups, self.members, self.keys) = (grouping.groups, grouping.members, grouping.keys);
    }
}

/// Returns a group's rate if a schedule, whose initial value is `base`, has the value `lr`.
fn scheduled(own: f64, base: f64, lr: f64) -> f64 {
    if own == base {
        lr
    } else if base == 0.0 {
        // A base of 0 has no ratio.
        own
    } else {
        own * (lr / base)
    }
}

fn handle(parameter: &NamedTensor) -> NamedTensor {
    NamedTensor { name: parameter.name.clone(), tensor: parameter.tensor.shallow_clone() }
}

fn same(a: &NamedTensor, b: &NamedTensor) -> bool {
    TensorId::of(&a.tensor) == TensorId::of(&b.tensor)
}

impl fmt::Debug for OptimizerInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizer")
            .field("rule", &self.rule)
            .field("parameters", &self.parameters.len())
            .field("groups", &self.groups.len())
            .field("lr", &self.lr)
            .field("steps", &self.steps().unwrap_or(self.steps))
            .finish_non_exhaustive()
    }
}
