//! State of an optimizer as a value, for checkpoints, under PyTorch's names.

use std::collections::BTreeMap;

use brigade_checkpoint::Value;
use brigade_torch::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use tch::Tensor;

/// Name of a parameter's step count, which in PyTorch is a tensor of 32-bit floats.
pub(crate) const STEP: &str = "step";

/// State of an optimizer, from [`Optimizer::state_dict`](crate::Optimizer::state_dict) and for
/// [`Optimizer::load_state_dict`](crate::Optimizer::load_state_dict).
///
/// `T` is a tensor, or a description of one.
#[derive(Debug)]
pub struct OptimizerState<T = Tensor> {
    /// Kind of the optimizer, as the name of PyTorch's class: `Adam`, `SGD`, …
    pub kind: String,
    /// Number of steps taken.
    pub steps: u64,
    /// Learning rate that the optimizer was built with.
    pub initial_lr: f64,
    /// Current learning rate.
    pub lr: f64,
    /// Parameter groups, in order.
    pub groups: Vec<GroupState>,
    /// States of all parameters, in the model's order.
    pub parameters: Vec<ParameterState<T>>,
}

/// Hyperparameters and parameter names of a group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// Hyperparameters under PyTorch's names: `lr`, `initial_lr`, `weight_decay`, `momentum` and the others. `betas`
    /// are `beta1` and `beta2`, flags are 0 or 1.
    pub numbers: BTreeMap<String, f64>,
    /// Names of the group's parameters.
    pub parameters: Vec<String>,
}

/// State of one parameter: the tensors that the optimizer keeps for it.
#[derive(Debug)]
pub struct ParameterState<T = Tensor> {
    /// Name of the parameter.
    pub name: String,
    /// PyTorch's names of the tensors with their values. Empty before the parameter's first step.
    pub tensors: Vec<(String, T)>,
}

/// First difference between a state and the optimizer that should load it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StateMismatch {
    /// The state belongs to another kind of optimizer.
    #[error("the optimizer's state is of {found}, but this optimizer is {expected}")]
    Kind {
        /// Name of this optimizer's kind.
        expected: String,
        /// Name of the kind in the state.
        found: String,
    },
    /// The state has another number of parameter groups.
    #[error(
        "the optimizer's state has {found} parameter groups, but this optimizer has {expected}: build it \
         with the same groups"
    )]
    Groups {
        /// Number of groups of this optimizer.
        expected: usize,
        /// Number of groups in the state.
        found: usize,
    },
    /// The state has another number of parameters, or other names, in the model or in a group.
    #[error(
        "the optimizer's state belongs to another model: parameter {index} of {of} is {found}, but this \
         optimizer has {expected}"
    )]
    Parameter {
        /// Part that differs: `the model` or `group 0`.
        of: String,
        /// Index of the first difference.
        index: usize,
        /// Name in this optimizer, or `none`.
        expected: String,
        /// Name in the state, or `none`.
        found: String,
    },
    /// A hyperparameter that the program sets differs.
    #[error(
        "the optimizer's state was made with {name} = {found} in group {group}, but this optimizer has \
         {expected}: build it with the same value"
    )]
    Number {
        /// PyTorch's name of the hyperparameter.
        name: String,
        /// Index of the group.
        group: usize,
        /// Value in this optimizer, or `nothing`.
        expected: String,
        /// Value in the state, or `nothing`.
        found: String,
    },
    /// A parameter's state has a tensor that this optimizer does not keep, or does not have one that it needs.
    #[error("the state of {parameter} {what} `{name}`, which this optimizer {does}")]
    Slot {
        /// Name of the parameter.
        parameter: String,
        /// The verb of the message: `has` or `lacks`.
        what: &'static str,
        /// Name of the tensor.
        name: String,
        /// The verb phrase of the message: `does not keep` or `needs`.
        does: &'static str,
    },
    /// A tensor of the state has another shape.
    #[error(
        "`{name}` of {parameter} has shape {found:?} in the optimizer's state, expected {expected:?}"
    )]
    Shape {
        /// Name of the parameter.
        parameter: String,
        /// Name of the tensor.
        name: String,
        /// Shape that follows from the parameter's shape.
        expected: Vec<i64>,
        /// Shape of the tensor in the state.
        found: Vec<i64>,
    },
    /// A group of the state has another number of parameters.
    #[error(
        "group {group} of the optimizer's state has {found} parameters, but that of this optimizer has \
         {expected}: choose the same parameters, in the same groups"
    )]
    Sizes {
        /// Index of the group.
        group: usize,
        /// Number of parameters in this optimizer's group.
        expected: usize,
        /// Number of parameters in the state's group.
        found: usize,
    },
    /// The file is not an optimizer's state.
    #[error("the file is not an optimizer's state: expected {expected}, found {found}")]
    Layout {
        /// Description of the expected contents.
        expected: String,
        /// Description of the file's contents.
        found: String,
    },
    /// A hyperparameter is missing in a file of PyTorch.
    #[error(
        "the optimizer's state has no `{name}` in group {group}: it belongs to another kind of optimizer"
    )]
    Missing {
        /// Index of the group.
        group: usize,
        /// PyTorch's name of the hyperparameter.
        name: String,
    },
    /// The `step` of a parameter is not a count of steps.
    #[error("`step` of {parameter} is {found} in the optimizer's state, expected a count of steps")]
    Step {
        /// Name of the parameter.
        parameter: String,
        /// Value of `step` in the state.
        found: f64,
    },
}

impl From<StateMismatch> for Error {
    fn from(error: StateMismatch) -> Self {
        Self::new(ErrorKind::Checkpoint, error)
    }
}

impl OptimizerState {
    /// Returns a copy with memory of its own, so that training may continue while the copy is written.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if memory runs out.
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
}

impl<T> OptimizerState<T> {
    /// Returns the state as a tree, in the format of checkpoints: `{kind, steps, initial_lr, lr, groups: [{numbers,
    /// parameters}], parameters: [name], state: {name: {slot: tensor}}}`, where `parameters` has the model's order.
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

    /// Reads a state from the tree that `to_value` returned. `copy` converts the tensors.
    ///
    /// # Errors
    /// Fails if a part of the tree is missing. The message contains its name.
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
}

fn strings<T>(list: Option<&Value<T>>) -> Option<Vec<String>> {
    list?.as_items()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}
