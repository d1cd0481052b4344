//! An optimizer's state as a value: for checkpoints, under PyTorch's names.

use std::collections::BTreeMap;

use brigade_checkpoint::Value;
use brigade_torch::{Error, ErrorKind, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::inner::OptimizerInner;
use crate::lookahead::Lookahead;
use crate::param_state::STEP;

/// What [`Optimizer::state_dict`](crate::Optimizer::state_dict) gives and
/// [`Optimizer::load_state_dict`](crate::Optimizer::load_state_dict) takes.
///
/// `T` is a tensor, or what is known of one.
#[derive(Debug)]
pub struct OptimizerState<T = Tensor> {
    /// The optimizer's kind, under the name of PyTorch's class: `Adam`, `SGD`, …
    pub kind: String,
    /// Steps taken.
    pub steps: u64,
    /// The learning rate that the optimizer was built with.
    pub initial_lr: f64,
    /// The learning rate now.
    pub lr: f64,
    /// The parameter groups, in order.
    pub groups: Vec<GroupState>,
    /// Every parameter, in the model's order, with what is kept of it.
    pub parameters: Vec<ParameterState<T>>,
}

/// A group's numbers and parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// `lr`, `initial_lr`, `weight_decay`, `momentum` and the others, under PyTorch's names; `betas` are
    /// `beta1` and `beta2`, flags are 0 or 1.
    pub numbers: BTreeMap<String, f64>,
    /// The names of its parameters.
    pub parameters: Vec<String>,
}

/// What is kept of one parameter.
#[derive(Debug)]
pub struct ParameterState<T = Tensor> {
    /// The parameter's name.
    pub name: String,
    /// PyTorch's names with their tensors; empty before the parameter's first step.
    pub tensors: Vec<(String, T)>,
}

/// The first difference between a state and the optimizer that it was to be loaded into.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StateMismatch {
    /// Another kind of optimizer.
    #[error("the optimizer's state is of {found}, but this optimizer is {expected}")]
    Kind {
        /// This optimizer.
        expected: String,
        /// The state's.
        found: String,
    },
    /// Another number of parameter groups.
    #[error(
        "the optimizer's state has {found} parameter groups, this optimizer {expected}: build it with \
         the same groups"
    )]
    Groups {
        /// This optimizer's.
        expected: usize,
        /// The state's.
        found: usize,
    },
    /// Another number of parameters, or other names, in the model or in a group.
    #[error(
        "the optimizer's state is of another model: as parameter {index} of {of} it has {found}, this \
         optimizer has {expected}"
    )]
    Parameter {
        /// `the model` or `group 0`.
        of: String,
        /// The index of the first difference.
        index: usize,
        /// The name here, or `none`.
        expected: String,
        /// The name in the state, or `none`.
        found: String,
    },
    /// A number that the program sets differs.
    #[error(
        "the optimizer's state was made with {name} = {found} in group {group}, this optimizer has \
         {expected}: build it with the same"
    )]
    Number {
        /// PyTorch's name.
        name: String,
        /// The group.
        group: usize,
        /// The value here, or `nothing`.
        expected: String,
        /// The value in the state, or `nothing`.
        found: String,
    },
    /// A parameter's state has a tensor that this optimizer does not keep, or lacks one.
    #[error("the state of {parameter} {what} `{name}`, which this optimizer {does}")]
    Slot {
        /// The parameter.
        parameter: String,
        /// `has` or `lacks`.
        what: &'static str,
        /// The tensor.
        name: String,
        /// `does not keep` or `needs`.
        does: &'static str,
    },
    /// A tensor of another shape.
    #[error(
        "`{name}` of {parameter} has shape {found:?} in the optimizer's state, expected {expected:?}"
    )]
    Shape {
        /// The parameter.
        parameter: String,
        /// The tensor.
        name: String,
        /// What the parameter's shape asks for.
        expected: Vec<i64>,
        /// The state's.
        found: Vec<i64>,
    },
    /// A group of another number of parameters.
    #[error(
        "group {group} of the optimizer's state has {found} parameters, this optimizer's {expected}: \
         choose the same parameters, in the same groups"
    )]
    Sizes {
        /// The group.
        group: usize,
        /// This optimizer's.
        expected: usize,
        /// The state's.
        found: usize,
    },
    /// A file that is not an optimizer's state.
    #[error("the file is not an optimizer's state: expected {expected}, found {found}")]
    Layout {
        /// What an optimizer's state has there.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A hyperparameter is missing in a file of PyTorch.
    #[error(
        "the optimizer's state has no `{name}` in group {group}: it is of another kind of optimizer"
    )]
    Missing {
        /// The group.
        group: usize,
        /// PyTorch's name.
        name: String,
    },
    /// A count of steps that is none.
    #[error("`step` of {parameter} is {found} in the optimizer's state, expected a count of steps")]
    Step {
        /// The parameter.
        parameter: String,
        /// The value.
        found: f64,
    },
}

impl From<StateMismatch> for Error {
    fn from(error: StateMismatch) -> Self {
        Self::new(ErrorKind::Checkpoint, error)
    }
}

impl OptimizerState {
    /// A copy with memory of its own: training may go on while it is written.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when there is no memory.
    pub fn deep_clone(&self) -> Result<Self> {
        let copy = |(name, tensor): &(String, Tensor)| {
            let mut memory = tensor.f_empty_like()?;
            memory.f_copy_(tensor)?;
            Ok((name.clone(), memory))
        };
        let parameters = self.parameters.iter().map(|parameter| {
            let tensors = parameter.tensors.iter().map(copy).collect::<Result<_>>()?;
            Ok(ParameterState { name: parameter.name.clone(), tensors })
        });
        Ok(Self {
            kind: self.kind.clone(),
            steps: self.steps,
            initial_lr: self.initial_lr,
            lr: self.lr,
            groups: self.groups.clone(),
            parameters: parameters.collect::<Result<_>>()?,
        })
    }

    pub(crate) fn of(inner: &OptimizerInner) -> Result<Self> {
        let parameters = inner.parameters.iter().enumerate().map(|(index, parameter)| {
            let tensors = inner.states.export(index, inner.rule.counts_steps())?;
            Ok(ParameterState { name: parameter.name.clone(), tensors })
        });
        Ok(Self {
            kind: inner.rule.name().to_owned(),
            steps: inner.steps()?,
            initial_lr: inner.initial_lr,
            lr: inner.lr,
            groups: (0..inner.groups.len()).map(|index| group(inner, index)).collect(),
            parameters: parameters.collect::<Result<_>>()?,
        })
    }

    /// Whether this state can be loaded into that optimizer.
    pub(crate) fn check(&self, inner: &OptimizerInner) -> Result<(), StateMismatch> {
        self.check_shapes(inner, &Tensor::size)?;
        let steps = self.parameters.iter().flat_map(|parameter| {
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
}

impl<T> OptimizerState<T> {
    /// Returns the state as a tree, in the form that checkpoints keep: `{kind, steps, initial_lr, lr,
    /// groups: [{numbers, parameters}], parameters: [name], state: {name: {slot: tensor}}}`, where
    /// `parameters` has the model's order.
    #[must_use]
    pub fn to_value(self) -> Value<T> {
        let strings =
            |names: &[String]| Value::List(names.iter().cloned().map(Value::Str).collect());
        let groups = self.groups.iter().map(|group| {
            let numbers = group.numbers.iter().map(|(name, &number)| (name, Value::Float(number)));
            Value::dict([
                ("numbers", Value::dict(numbers)),
                ("parameters", strings(&group.parameters)),
            ])
        });
        let groups = Value::List(groups.collect());
        let names: Vec<String> = self.parameters.iter().map(|p| p.name.clone()).collect();
        let slots = self.parameters.into_iter().map(|ParameterState { name, tensors }| {
            (
                name,
                Value::dict(
                    tensors.into_iter().map(|(slot, tensor)| (slot, Value::Tensor(tensor))),
                ),
            )
        });
        Value::dict([
            ("kind", Value::Str(self.kind)),
            ("steps", Value::Int(self.steps.cast_signed())),
            ("initial_lr", Value::Float(self.initial_lr)),
            ("lr", Value::Float(self.lr)),
            ("groups", groups),
            ("parameters", strings(&names)),
            ("state", Value::dict(slots)),
        ])
    }

    /// Reads such a tree; `copy` makes the state's tensors of the tree's.
    ///
    /// # Errors
    /// What is missing, in words.
    pub fn from_value<U>(tree: &Value<U>, copy: impl Fn(&U) -> T) -> Result<Self, String> {
        let lacks = |what: &str| format!("an optimizer's state needs {what}");
        let number = |key: &str| {
            tree.get(key)
                .and_then(Value::as_float)
                .ok_or_else(|| lacks(&format!("the number `{key}`")))
        };
        let groups = tree.get("groups").and_then(Value::as_items).unwrap_or_default().iter();
        let groups = groups.map(|group| {
            let numbers = group.get("numbers").and_then(Value::as_dict);
            let numbers = numbers.ok_or_else(|| lacks("`numbers` in each group"))?.iter();
            let numbers = numbers.map(|(name, number)| {
                let entry = name.as_str().map(str::to_owned).zip(number.as_float());
                entry.ok_or_else(|| lacks("names with numbers in `numbers`"))
            });
            Ok(GroupState {
                numbers: numbers.collect::<Result<_, String>>()?,
                parameters: strings(group.get("parameters"))
                    .ok_or_else(|| lacks("names in each group"))?,
            })
        });
        let groups = groups.collect::<Result<_, String>>()?;
        let names =
            strings(tree.get("parameters")).ok_or_else(|| lacks("the list `parameters`"))?;
        let slots = tree.get("state").ok_or_else(|| lacks("the dictionary `state`"))?;
        let parameters = names.into_iter().map(|name| {
            let entries = slots.get(&name).and_then(Value::as_dict).unwrap_or_default().iter();
            let tensors = entries.map(|(slot, tensor)| {
                let entry = slot.as_str().map(str::to_owned).zip(tensor.as_tensor().map(&copy));
                entry.ok_or_else(|| lacks(&format!("names with tensors under `{name}`")))
            });
            Ok(ParameterState { tensors: tensors.collect::<Result<_, String>>()?, name })
        });
        let parameters = parameters.collect::<Result<_, String>>()?;
        let kind = tree.get("kind").and_then(Value::as_str).ok_or_else(|| lacks("its `kind`"))?;
        let steps = tree.get("steps").and_then(Value::as_int).and_then(|n| u64::try_from(n).ok());
        Ok(Self {
            kind: kind.to_owned(),
            steps: steps.ok_or_else(|| lacks("the count `steps`"))?,
            initial_lr: number("initial_lr")?,
            lr: number("lr")?,
            groups,
            parameters,
        })
    }

    /// As `check`, by the shapes of its tensors.
    pub(crate) fn check_shapes(
        &self,
        inner: &OptimizerInner,
        shape: &dyn Fn(&T) -> Vec<i64>,
    ) -> Result<(), StateMismatch> {
        let expected = inner.rule.name();
        if self.kind != expected {
            return Err(StateMismatch::Kind {
                expected: expected.to_owned(),
                found: self.kind.clone(),
            });
        }
        let found = self.parameters.iter().map(|parameter| parameter.name.as_str());
        let expected = inner.parameters.iter().map(|parameter| parameter.name.as_str());
        same_names("the model", found, expected)?;
        if self.groups.len() != inner.groups.len() {
            return Err(StateMismatch::Groups {
                expected: inner.groups.len(),
                found: self.groups.len(),
            });
        }
        for (index, found) in self.groups.iter().enumerate() {
            let expected = group(inner, index);
            same_names(
                &format!("group {index}"),
                found.parameters.iter().map(String::as_str),
                expected.parameters.iter().map(String::as_str),
            )?;
            same_numbers(index, &found.numbers, &expected.numbers, inner.rule.momentum_name())?;
        }
        self.parameters
            .iter()
            .enumerate()
            .try_for_each(|(index, found)| slots(inner, index, found, shape))
    }
}

pub(crate) fn group(inner: &OptimizerInner, index: usize) -> GroupState {
    let group = &inner.groups[index];
    let mut numbers: BTreeMap<String, f64> = inner
        .rule
        .hyperparameters()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    numbers.extend(group.numbers(inner.rule.momentum_name()));
    if let Some(Lookahead { every, alpha }) = inner.lookahead {
        numbers.insert("lookahead_every".to_owned(), every as f64);
        numbers.insert("lookahead_alpha".to_owned(), alpha);
    }
    GroupState { numbers, parameters: group.names().to_vec() }
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

/// The numbers that a schedule or the user moves must be there; the rule's own must be equal.
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

/// A parameter has no state before its first step; after it, every slot that is not optional.
fn slots<T>(
    inner: &OptimizerInner,
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
    let size = inner.parameters[index].tensor.size();
    let names = inner.slots();
    for (name, tensor) in &found.tensors {
        let (expected, found_shape) = if name == STEP && inner.rule.counts_steps() {
            (Vec::new(), shape(tensor))
        } else {
            let slot = names.iter().position(|known| known == name).ok_or_else(|| unknown(name))?;
            (inner.slot_shape(slot, &size).ok_or_else(|| unknown(name))?, shape(tensor))
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
        .filter(|&(slot, _)| inner.slot_shape(slot, &size).is_some() && !inner.is_optional(slot));
    let mut needed = kept.map(|(_, &name)| name).chain(inner.rule.counts_steps().then_some(STEP));
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

fn strings<T>(list: Option<&Value<T>>) -> Option<Vec<String>> {
    list?.as_items()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}
