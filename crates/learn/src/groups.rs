//! The optimizer of a Learner: parameter groups, freezing, and their hyperparameters.

use std::collections::HashSet;
use std::sync::Arc;

use brigade_optim::{Group, Optimizer, OptimizerSettings, OptimizerState, Overrides};
use brigade_rank_env::text::counted;
use brigade_torch::{Error, NamedTensor, Result};
use brigade_train::{Accelerator, PreparedOptimizer};

use crate::hyper::{GroupHypers, Hyper};

/// Parameter groups of a model, with the optimizer that steps those that are not frozen.
#[derive(Debug)]
pub(crate) struct Grouped {
    settings: Arc<dyn OptimizerSettings>,
    /// Names of the parameters of each group.
    groups: Vec<Vec<String>>,
    norms: HashSet<String>,
    pub(crate) options: GroupOptions,
    hypers: Vec<GroupHypers>,
    /// Number of frozen groups: those before this index.
    frozen: usize,
    held: Option<Held>,
    /// Index of the parameter group to which each group of the optimizer belongs.
    of_optimizer: Vec<usize>,
    has_momentum: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupOptions {
    /// `true` if normalisations are trained in frozen groups as well.
    pub(crate) train_norms: bool,
    /// `true` if norms and biases have weight decay as well.
    pub(crate) decay_norms_and_biases: bool,
    pub(crate) weight_decay: Option<f64>,
}

#[derive(Debug)]
enum Held {
    Plain(Optimizer),
    Prepared(PreparedOptimizer),
}

impl Grouped {
    pub(crate) fn new(
        settings: Arc<dyn OptimizerSettings>,
        groups: Vec<Vec<String>>,
        norms: Vec<String>,
    ) -> Self {
        Self {
            settings,
            groups,
            norms: norms.into_iter().collect(),
            options: GroupOptions {
                train_norms: true,
                decay_norms_and_biases: false,
                weight_decay: None,
            },
            hypers: Vec::new(),
            frozen: 0,
            held: None,
            of_optimizer: Vec::new(),
            has_momentum: false,
        }
    }

    pub(crate) fn set_settings(&mut self, settings: Arc<dyn OptimizerSettings>) {
        self.settings = settings;
        self.held = None;
        self.hypers.clear();
    }

    pub(crate) fn settings_lr(&self) -> f64 {
        self.settings.settings_lr()
    }

    /// Sets other groups, which must together contain each of the model's parameters once.
    pub(crate) fn set_groups(
        &mut self,
        groups: Vec<Vec<String>>,
        parameters: &[NamedTensor],
    ) -> Result<()> {
        for parameter in parameters {
            let count = groups.iter().flatten().filter(|name| **name == parameter.name).count();
            if count != 1 {
                return Err(Error::invalid_argument(format!(
                    "parameter `{}` is in {}; every parameter belongs to exactly one",
                    parameter.name,
                    counted(count, "parameter group")
                )));
            }
        }
        let known: HashSet<&str> = parameters.iter().map(|it| it.name.as_str()).collect();
        if let Some(name) = groups.iter().flatten().find(|name| !known.contains(name.as_str())) {
            return Err(Error::invalid_argument(format!(
                "a parameter group has `{name}`, which the model lacks"
            )));
        }
        if groups.iter().any(Vec::is_empty) {
            return Err(Error::invalid_argument("a parameter group is empty"));
        }
        (self.groups, self.held, self.frozen) = (groups, None, 0);
        self.hypers.clear();
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.groups.len()
    }

    pub(crate) fn names(&self) -> &[Vec<String>] {
        &self.groups
    }

    pub(crate) fn frozen(&self) -> usize {
        self.frozen
    }

    /// Freezes the groups before `first`, and resets the optimizer's state, as fastai does.
    pub(crate) fn freeze_to(&mut self, first: usize) {
        self.frozen = first;
        self.held = None;
    }

    /// Removes the optimizer, and sets the hyperparameters of the next one.
    pub(crate) fn forget(&mut self, hypers: Vec<GroupHypers>) {
        (self.held, self.hypers) = (None, hypers);
    }

    /// Removes the optimizer's state and hyperparameters.
    pub(crate) fn reset(&mut self) {
        self.held = None;
        self.hypers.clear();
    }

    pub(crate) fn is_built(&self) -> bool {
        self.held.is_some()
    }

    /// Returns the parameters that are trained: those of groups that are not frozen, and normalisations of frozen
    /// groups unless that is switched off.
    pub(crate) fn trained(&self) -> HashSet<String> {
        let frozen = self.groups.iter().take(self.frozen).flatten();
        let norms = frozen.filter(|name| self.options.train_norms && self.norms.contains(*name));
        self.groups.iter().skip(self.frozen).flatten().chain(norms).cloned().collect()
    }

    /// Returns the names of the parameters without weight decay: those of normalisations, and those called `bias`. The
    /// biases of an LSTM, which have other names, have weight decay, as in fastai.
    fn without_decay(&self, parameters: &[NamedTensor]) -> Vec<String> {
        if self.options.decay_norms_and_biases {
            return Vec::new();
        }
        let names = parameters.iter().map(|it| &it.name);
        let is_bias = |name: &str| name.rsplit('.').next() == Some("bias");
        names.filter(|name| self.norms.contains(*name) || is_bias(name)).cloned().collect()
    }

    /// Makes the optimizer if there is none. `parameters` are the model's; those that require a gradient are stepped.
    /// `lr` is the learning rate of groups that have none yet.
    pub(crate) fn build(&mut self, parameters: &[NamedTensor], lr: f64) -> Result<()> {
        if self.held.is_some() {
            return Ok(());
        }
        let trained: Vec<NamedTensor> = parameters
            .iter()
            .filter(|parameter| parameter.tensor.requires_grad())
            .map(|parameter| NamedTensor {
                name: parameter.name.clone(),
                tensor: parameter.tensor.shallow_clone(),
            })
            .collect();
        let names: HashSet<&str> = trained.iter().map(|it| it.name.as_str()).collect();
        let mut groups = Vec::new();
        for members in &self.groups {
            let mut members = members.iter().filter(|name| names.contains(name.as_str()));
            if let Some(first) = members.next() {
                groups.push(members.fold(Group::matching(first), Group::or));
            }
        }
        let overrides = Overrides {
            lr: Some(lr),
            weight_decay: self.options.weight_decay,
            without_decay: Some(self.without_decay(&trained)),
            groups,
            ..Overrides::default()
        };
        let optimizer = self.settings.build_with(&trained, overrides)?;
        let made = optimizer.groups();
        self.of_optimizer = made
            .iter()
            .map(|group| {
                let first = group.names().first();
                let of = |members: &Vec<String>| first.is_some_and(|name| members.contains(name));
                self.groups.iter().position(of).unwrap_or_default()
            })
            .collect();
        self.has_momentum = made.iter().any(|group| group.momentum() > 0.0);
        if self.hypers.is_empty() {
            let decay = made.iter().find(|group| !group.is_exempt_from_decay());
            let first = GroupHypers {
                lr,
                momentum: made.first().map_or(0.0, |group| group.momentum()),
                weight_decay: decay.map_or_else(
                    || self.options.weight_decay.unwrap_or(0.0),
                    |group| group.weight_decay(),
                ),
            };
            self.hypers = vec![first; self.groups.len()];
        }
        self.held = Some(Held::Plain(optimizer));
        for hyper in [Hyper::Lr, Hyper::Momentum, Hyper::WeightDecay] {
            let values: Vec<f64> = self.hypers.iter().map(|it| it.get(hyper)).collect();
            self.set(hyper, &values)?;
        }
        Ok(())
    }

    pub(crate) fn prepare(&mut self, accelerator: &Accelerator) -> Result<()> {
        match self.held.take() {
            Some(Held::Plain(optimizer)) => {
                // A handle of the same optimizer: after an error it is unchanged.
                self.held = Some(Held::Plain(optimizer.clone()));
                self.held = Some(Held::Prepared(accelerator.prepare(optimizer)?));
            }
            other => self.held = other,
        }
        Ok(())
    }

    pub(crate) fn detach(&mut self) {
        self.held = self.held.take().map(|held| match held {
            Held::Prepared(optimizer) => Held::Plain(optimizer.into_inner()),
            plain @ Held::Plain(_) => plain,
        });
    }

    /// Returns a handle of the optimizer, once there is one and nothing of its last step is in flight.
    pub(crate) fn optimizer(&self) -> Result<Option<Optimizer>> {
        Ok(match &self.held {
            Some(Held::Plain(optimizer)) => Some(optimizer.clone()),
            Some(Held::Prepared(optimizer)) => Some(optimizer.settled()?),
            None => None,
        })
    }

    /// Returns the whole state of an optimizer of shards on rank 0. All ranks take part.
    pub(crate) fn full_state_dict(&self) -> Result<Option<OptimizerState>> {
        match &self.held {
            Some(Held::Prepared(optimizer)) => optimizer.full_state_dict(),
            _ => Ok(None),
        }
    }

    /// Returns this rank's part of rank 0's state, for a prepared optimizer. All ranks take part.
    pub(crate) fn scatter_state_dict(
        &self,
        state: Option<OptimizerState>,
    ) -> Result<Option<OptimizerState>> {
        match &self.held {
            Some(Held::Prepared(optimizer)) => optimizer.scatter_state_dict(state).map(Some),
            _ => Ok(None),
        }
    }

    pub(crate) fn step(&mut self) -> Result<()> {
        match &mut self.held {
            Some(Held::Prepared(optimizer)) => Ok(optimizer.step()?),
            Some(Held::Plain(optimizer)) => Ok(optimizer.step()?),
            None => Ok(()),
        }
    }

    pub(crate) fn zero_grad(&mut self) -> Result<()> {
        match &mut self.held {
            Some(Held::Prepared(optimizer)) => Ok(optimizer.zero_grad()?),
            Some(Held::Plain(optimizer)) => Ok(optimizer.zero_grad()?),
            None => Ok(()),
        }
    }

    pub(crate) fn hypers(&self) -> &[GroupHypers] {
        &self.hypers
    }

    /// Sets a hyperparameter of each group.
    pub(crate) fn set(&mut self, hyper: Hyper, values: &[f64]) -> Result<()> {
        if values.len() != self.groups.len() {
            return Err(Error::invalid_argument(format!(
                "found {} of {} for {}; give one for each",
                counted(values.len(), "value"),
                hyper.name(),
                counted(self.groups.len(), "parameter group")
            )));
        }
        if let Some(value) = values.iter().find(|value| !value.is_finite() || **value < 0.0) {
            return Err(Error::invalid_argument(format!(
                "{} cannot be {value}; expected finite numbers from 0",
                hyper.name()
            )));
        }
        for (hypers, value) in self.hypers.iter_mut().zip(values) {
            hypers.set(hyper, *value);
        }
        // An optimizer that was made without momentum keeps none, regardless of the schedule.
        if hyper == Hyper::Momentum && !self.has_momentum {
            return Ok(());
        }
        let Some(mut optimizer) = self.optimizer()? else { return Ok(()) };
        let exempt = (hyper == Hyper::WeightDecay).then(|| optimizer.groups());
        for (index, group) in self.of_optimizer.iter().enumerate() {
            let value = values[*group];
            match hyper {
                Hyper::Lr => optimizer.set_group_lr(index, value)?,
                Hyper::Momentum => optimizer.set_group_momentum(index, value)?,
                Hyper::WeightDecay => {
                    let exempt =
                        exempt.as_ref().is_some_and(|made| made[index].is_exempt_from_decay());
                    if !exempt {
                        optimizer.set_group_weight_decay(index, value)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the hyperparameters that a loaded state has set in the optimizer.
    pub(crate) fn read_back(&mut self) -> Result<()> {
        let Some(optimizer) = self.optimizer()? else { return Ok(()) };
        for (group, index) in optimizer.groups().iter().zip(&self.of_optimizer) {
            let Some(hypers) = self.hypers.get_mut(*index) else { continue };
            hypers.lr = group.lr();
            if self.has_momentum {
                hypers.momentum = group.momentum();
            }
            if !group.is_exempt_from_decay() {
                hypers.weight_decay = group.weight_decay();
            }
        }
        Ok(())
    }
}
