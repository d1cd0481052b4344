//! An optimizer's state: conversion to a value, and checking and loading of a value.

use std::collections::BTreeMap;

use brigade_torch::Result;
use tch::Tensor;

use super::OptimizerInner;
use crate::lookahead::Lookahead;
use crate::state::{GroupState, OptimizerState, ParameterState, STEP, StateMismatch};

impl OptimizerInner {
    pub(crate) fn state_dict(&self) -> Result<OptimizerState> {
        let parameters = self.parameters.iter().enumerate().map(|(index, parameter)| {
            let tensors = self.states.export(index, self.rule.counts_steps())?;
            Ok(ParameterState { name: parameter.name.clone(), tensors })
        });
        Ok(OptimizerState {
            kind: self.rule.name().to_owned(),
            steps: self.steps()?,
            initial_lr: self.initial_lr,
            lr: self.lr,
            groups: (0..self.groups.len()).map(|index| self.group_state(index)).collect(),
            parameters: parameters.collect::<Result<_>>()?,
        })
    }

    fn group_state(&self, index: usize) -> GroupState {
        let group = &self.groups[index];
        let mut numbers: BTreeMap<String, f64> = self
            .rule
            .hyperparameters()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        numbers.extend(group.numbers(self.rule.momentum_name()));
        if let Some(Lookahead { every, alpha }) = self.lookahead {
            numbers.insert("lookahead_every".to_owned(), every as f64);
            numbers.insert("lookahead_alpha".to_owned(), alpha);
        }
        GroupState { numbers, parameters: group.names().to_vec() }
    }

    /// Loads a state. Everything is checked first; a mismatch changes nothing.
    pub(crate) fn load_state_dict(&mut self, state: &OptimizerState, adopt: bool) -> Result<()> {
        self.check_state(state)?;
        let mut states = self.states.none();
        for (index, (parameter, found)) in self.parameters.iter().zip(&state.parameters).enumerate()
        {
            let shape = |slot, size: &[i64]| self.slot_shape(slot, size);
            states.import(index, parameter, found, adopt, shape)?;
        }
        let momentum_name = self.rule.momentum_name();
        for (group, found) in self.groups.iter_mut().zip(&state.groups) {
            group.load(&found.numbers, momentum_name);
        }
        self.states = states;
        (self.initial_lr, self.lr) = (state.initial_lr, state.lr);
        self.steps = state.steps;
        self.launched = state.steps;
        self.count = None;
        Ok(())
    }

    /// Returns the first mismatch that prevents loading the state.
    fn check_state(&self, state: &OptimizerState) -> Result<(), StateMismatch> {
        self.check_shapes(state, &Tensor::size)?;
        let steps = state.parameters.iter().flat_map(|parameter| {
            let steps = parameter.tensors.iter().filter(|(name, _)| name == STEP);
            steps.map(|(_, tensor)| (&parameter.name, tensor))
        });
        for (parameter, tensor) in steps {
            let found = tensor.f_double_value(&[]).unwrap_or(f64::NAN);
            if !(found >= 0.0 && found.fract() == 0.0) {
                return Err(StateMismatch::Step { parameter: parameter.clone(), found });
            }
        }
        Ok(())
    }

    /// Checks the state by the shapes of its tensors alone.
    pub(crate) fn check_shapes<T>(
        &self,
        state: &OptimizerState<T>,
        shape: &dyn Fn(&T) -> Vec<i64>,
    ) -> Result<(), StateMismatch> {
        let expected = self.rule.name();
        if state.kind != expected {
            return Err(StateMismatch::Kind {
                expected: expected.to_owned(),
                found: state.kind.clone(),
            });
        }
        let found = state.parameters.iter().map(|parameter| parameter.name.as_str());
        let expected = self.parameters.iter().map(|parameter| parameter.name.as_str());
        same_names("the model", found, expected)?;
        if state.groups.len() != self.groups.len() {
            return Err(StateMismatch::Groups {
                expected: self.groups.len(),
                found: state.groups.len(),
            });
        }
        for (index, found) in state.groups.iter().enumerate() {
            let expected = self.group_state(index);
            same_names(
                &format!("group {index}"),
                found.parameters.iter().map(String::as_str),
                expected.parameters.iter().map(String::as_str),
            )?;
            same_numbers(index, &found.numbers, &expected.numbers, self.rule.momentum_name())?;
        }
        state
            .parameters
            .iter()
            .enumerate()
            .try_for_each(|(index, found)| self.check_slots(index, found, shape))
    }

    /// Checks the slots of a parameter: it has none before its first step, and every slot that is not optional after
    /// it.
    fn check_slots<T>(
        &self,
        index: usize,
        found: &ParameterState<T>,
        shape: &dyn Fn(&T) -> Vec<i64>,
    ) -> Result<(), StateMismatch> {
        let unknown = |name: &str| StateMismatch::Slot {
            parameter: found.name.clone(),
            what: "has",
            name: name.to_owned(),
            does: "does not keep",
        };
        let size = self.parameters[index].tensor.size();
        let names = self.slots();
        for (name, tensor) in &found.tensors {
            let (expected, found_shape) = if name == STEP && self.rule.counts_steps() {
                (Vec::new(), shape(tensor))
            } else {
                let slot =
                    names.iter().position(|known| known == name).ok_or_else(|| unknown(name))?;
                (self.slot_shape(slot, &size).ok_or_else(|| unknown(name))?, shape(tensor))
            };
            if found_shape != expected {
                return Err(StateMismatch::Shape {
                    parameter: found.name.clone(),
                    name: name.clone(),
                    expected,
                    found: found_shape,
                });
            }
        }
        let there = |name: &str| found.tensors.iter().any(|(known, _)| known == name);
        let kept = names
            .iter()
            .enumerate()
            .filter(|&(slot, _)| self.slot_shape(slot, &size).is_some() && !self.is_optional(slot));
        let mut needed =
            kept.map(|(_, &name)| name).chain(self.rule.counts_steps().then_some(STEP));
        match needed.find(|name| !there(name)) {
            Some(name) if !found.tensors.is_empty() => Err(StateMismatch::Slot {
                parameter: found.name.clone(),
                what: "lacks",
                name: name.to_owned(),
                does: "needs",
            }),
            _ => Ok(()),
        }
    }

    /// Returns the names of the slots.
    fn slots(&self) -> &[&'static str] {
        self.states.names()
    }

    /// Returns the shape of a slot for a parameter of this size.
    pub(super) fn slot_shape(&self, slot: usize, size: &[i64]) -> Option<Vec<i64>> {
        if slot < self.rule.slots().len() {
            self.rule.slot_shape(slot, size)
        } else {
            Some(size.to_vec())
        }
    }

    fn is_optional(&self, slot: usize) -> bool {
        slot < self.rule.slots().len() && self.rule.is_optional(slot)
    }
}

fn same_names<'a>(
    of: &str,
    mut found: impl Iterator<Item = &'a str>,
    mut expected: impl Iterator<Item = &'a str>,
) -> Result<(), StateMismatch> {
    let mut index = 0;
    loop {
        let (found, expected) = (found.next(), expected.next());
        if found != expected {
            let name =
                |name: Option<&str>| name.map_or_else(|| "none".to_owned(), |n| format!("`{n}`"));
            return Err(StateMismatch::Parameter {
                of: of.to_owned(),
                index,
                expected: name(expected),
                found: name(found),
            });
        }
        if found.is_none() {
            return Ok(());
        }
        index += 1;
    }
}

/// Compares hyperparameters: those that a schedule or the user may change must exist; those of the rule must be equal.
fn same_numbers(
    group: usize,
    found: &BTreeMap<String, f64>,
    expected: &BTreeMap<String, f64>,
    momentum_name: Option<&str>,
) -> Result<(), StateMismatch> {
    let moved = |name: &str| {
        matches!(name, "lr" | "initial_lr" | "weight_decay") || Some(name) == momentum_name
    };
    for name in expected.keys().chain(found.keys()) {
        let (here, there) = (expected.get(name), found.get(name));
        let fits = match (here, there) {
            (Some(_), Some(there)) if moved(name) => there.is_finite() && *there >= 0.0,
            (here, there) => here == there,
        };
        if !fits {
            let text =
                |value: Option<&f64>| value.map_or_else(|| "nothing".to_owned(), f64::to_string);
            return Err(StateMismatch::Number {
                name: name.clone(),
                group,
                expected: if moved(name) { "a number from 0 up".to_owned() } else { text(here) },
                found: text(there),
            });
        }
    }
    Ok(())
}
