//! Options of all optimizers: learning rate, weight decay and parameter groups.

use brigade_torch::{Error, NamedTensor, Result, Trainable};

use crate::check::check;
use crate::group::{Group, ParameterGroup};
use crate::lookahead::Lookahead;
use crate::rule::Rule;

/// Settings that every optimizer has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    pub(crate) groups: Vec<Group>,
    /// Patterns of names, with `true` for selected and `false` for excluded parameters.
    pub(crate) selection: Vec<(String, bool)>,
    pub(crate) no_decay_on_norms_and_biases: bool,
    /// Names of the parameters without weight decay, if the caller knows the layers.
    pub(crate) without_decay: Option<Vec<String>>,
    pub(crate) decay: WeightDecay,
    pub(crate) lookahead: Option<Lookahead>,
}

/// Kind of weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightDecay {
    /// The weight times the decay is added to the gradient.
    Added,
    /// Decoupled: the weight shrinks by the learning rate times the decay before each step.
    Decoupled,
}

impl WeightDecay {
    pub(crate) fn as_number(self) -> f64 {
        f64::from(u8::from(self == Self::Decoupled))
    }
}

/// Macro that generates the methods of every optimizer's options.
macro_rules! common_options {
    ($($header:tt)*) => {
        $($header)* {
            /// Sets the learning rate, in place of the one that the options were created with.
            pub fn lr(mut self, lr: f64) -> Self {
                self.options.lr = lr;
                self
            }

            /// Sets the weight decay. Defaults to 0, or to 0.01 for AdamW and 0.1 for Muon.
            pub fn weight_decay(mut self, weight_decay: f64) -> Self {
                self.options.weight_decay = weight_decay;
                self
            }

            /// Adds a group of parameters, chosen by name, with hyperparameters of its own. May be called several
            /// times.
            pub fn group(mut self, group: $crate::Group) -> Self {
                self.options.groups.push(group);
                self
            }

            /// Sets whether biases and the weights of norms are exempt from weight decay. Defaults to `false`. These
            /// are the parameters that are named `bias`, have a bias of the same shape in their module, or have fewer
            /// than two dimensions.
            pub fn no_decay_on_norms_and_biases(mut self, on: bool) -> Self {
                self.options.no_decay_on_norms_and_biases = on;
                self
            }

            /// Restricts the optimizer to the parameters whose name matches the pattern (see
            /// [`Group::matching`](crate::Group::matching)). Further calls add parameters. Defaults to all parameters.
            pub fn only(mut self, pattern: impl Into<String>) -> Self {
                self.options.selection.push((pattern.into(), true));
                self
            }

            /// Excludes the parameters whose name matches the pattern.
            pub fn except(mut self, pattern: impl Into<String>) -> Self {
                self.options.selection.push((pattern.into(), false));
                self
            }

            /// Adds lookahead: slow weights that follow the optimizer's.
            pub fn lookahead(mut self, lookahead: $crate::Lookahead) -> Self {
                self.options.lookahead = Some(lookahead);
                self
            }
        }
    };
}
pub(crate) use common_options;

/// Division of parameters into groups.
#[derive(Debug)]
pub(crate) struct Grouping {
    pub(crate) groups: Vec<ParameterGroup>,
    /// Indices of each group's parameters.
    pub(crate) members: Vec<Vec<usize>>,
    /// Position of each group in the options (0 for parameters without a group), and `true` for its half without decay.
    pub(crate) keys: Vec<(usize, bool)>,
}

impl Options {
    pub(crate) fn new(lr: f64) -> Self {
        Self {
            lr,
            weight_decay: 0.0,
            groups: Vec::new(),
            selection: Vec::new(),
            no_decay_on_norms_and_biases: false,
            without_decay: None,
            decay: WeightDecay::Added,
            lookahead: None,
        }
    }

    /// Returns options with decoupled weight decay.
    pub(crate) fn decoupled(lr: f64) -> Self {
        Self { decay: WeightDecay::Decoupled, ..Self::new(lr) }
    }

    /// Checks the options, and returns the model's parameters that `only` and `except` select.
    pub(crate) fn choose(
        &self,
        rule: &impl Rule,
        model: &(impl Trainable + ?Sized),
    ) -> Result<Vec<NamedTensor>> {
        check("the learning rate", self.lr, 0.0..f64::INFINITY)?;
        check("the weight decay", self.weight_decay, 0.0..f64::INFINITY)?;
        for group in &self.groups {
            group.check(rule)?;
        }
        if let Some(lookahead) = self.lookahead {
            lookahead.check()?;
        }
        let mut parameters = model.trainable_parameters();
        if parameters.is_empty() {
            return Err(Error::invalid_argument(
                "an optimizer needs a parameter that is trained; this model has none",
            ));
        }
        self.check_patterns(&parameters)?;
        parameters.retain(|parameter| self.selects(&parameter.name));
        if parameters.is_empty() {
            return Err(Error::invalid_argument(
                "`except` leaves out every parameter that the optimizer would step",
            ));
        }
        for parameter in &parameters {
            rule.check_parameter(&parameter.name, &parameter.tensor.size())?;
        }
        self.check_groups(&parameters)?;
        Ok(parameters)
    }

    /// Divides parameters into the groups that match them. Empty groups are omitted.
    pub(crate) fn grouping(&self, momentum: f64, parameters: &[NamedTensor]) -> Grouping {
        let mut grouping = Grouping { groups: Vec::new(), members: Vec::new(), keys: Vec::new() };
        for (key, (group, members)) in self.split(parameters).into_iter().enumerate() {
            let number = |own: fn(&Group) -> Option<f64>, all| group.and_then(own).unwrap_or(all);
            let lr = number(|group| group.lr, self.lr);
            let weight_decay = number(|group| group.weight_decay, self.weight_decay);
            let momentum = number(|group| group.momentum, momentum);
            let (plain, decayed): (Vec<usize>, Vec<usize>) =
                members.into_iter().partition(|&index| match &self.without_decay {
                    Some(names) => names.contains(&parameters[index].name),
                    None => self.no_decay_on_norms_and_biases && is_norm_or_bias(parameters, index),
                });
            for (members, weight_decay, plain) in
                [(decayed, weight_decay, false), (plain, 0.0, true)]
            {
                if members.is_empty() {
                    continue;
                }
                let names = members.iter().map(|&index| parameters[index].name.clone()).collect();
                let group = ParameterGroup {
                    names,
                    initial_lr: lr,
                    lr,
                    weight_decay,
                    momentum,
                    exempt: plain,
                };
                grouping.groups.push(group);
                grouping.members.push(members);
                grouping.keys.push((key, plain));
            }
        }
        grouping
    }

    /// Returns `true` if `only` and `except` select this name.
    pub(crate) fn selects(&self, name: &str) -> bool {
        let any = |chooses: bool| {
            self.selection.iter().any(|(pattern, c)| *c == chooses && matches(pattern, name))
        };
        let chooses = self.selection.iter().any(|(_, chooses)| *chooses);
        (!chooses || any(true)) && !any(false)
    }

    /// Fails for a pattern of `only` or `except` that matches nothing: it is probably misspelled.
    fn check_patterns(&self, parameters: &[NamedTensor]) -> Result<()> {
        for (pattern, _) in &self.selection {
            if !parameters.iter().any(|parameter| matches(pattern, &parameter.name)) {
                return Err(no_match(pattern, parameters));
            }
        }
        Ok(())
    }

    /// Fails for a group without parameters: its pattern is probably misspelled.
    fn check_groups(&self, parameters: &[NamedTensor]) -> Result<()> {
        let patterns = self.groups.iter().flat_map(|group| &group.patterns);
        for pattern in patterns {
            if !parameters.iter().any(|parameter| matches(pattern, &parameter.name)) {
                return Err(no_match(pattern, parameters));
            }
        }
        let mut split = self.split(parameters).into_iter();
        match split.find(|(group, members)| group.is_some() && members.is_empty()) {
            Some((Some(group), _)) => Err(Error::invalid_argument(format!(
                "the parameter group {:?} is empty: groups before it take all that it matches",
                group.patterns
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the indices of each group's parameters. The first are those of parameters without a group.
    fn split(&self, parameters: &[NamedTensor]) -> Vec<(Option<&Group>, Vec<usize>)> {
        let mut left: Vec<usize> = (0..parameters.len()).collect();
        let mut groups = Vec::new();
        for group in &self.groups {
            let taken = |index: &usize| {
                group.patterns.iter().any(|pattern| matches(pattern, &parameters[*index].name))
            };
            let (ours, others): (Vec<usize>, Vec<usize>) =
                left.iter().partition(|index| taken(index));
            left = others;
            groups.push((Some(group), ours));
        }
        groups.insert(0, (None, left));
        groups
    }
}

impl Group {
    fn check(&self, rule: &impl Rule) -> Result<()> {
        let of = |what: &str| format!("{what} of the parameter group {:?}", self.patterns);
        if let Some(lr) = self.lr {
            check(&of("the learning rate"), lr, 0.0..f64::INFINITY)?;
        }
        if let Some(weight_decay) = self.weight_decay {
            check(&of("the weight decay"), weight_decay, 0.0..f64::INFINITY)?;
        }
        match (self.momentum, rule.momentum_name()) {
            (None, _) => Ok(()),
            (Some(_), None) => Err(Error::invalid_argument(format!(
                "{} is set, but {} has no momentum",
                of("the momentum"),
                rule.name()
            ))),
            (Some(momentum), Some("beta1")) => check(&of("the first beta"), momentum, 0.0..1.0),
            (Some(momentum), _) => check(&of("the momentum"), momentum, 0.0..f64::INFINITY),
        }
    }
}

/// Returns `true` if the pattern matches the whole name: `*` stands for any characters, `?` for one.
fn matches(pattern: &str, name: &str) -> bool {
    wildmatch::WildMatch::new(pattern).matches(name)
}

fn no_match(pattern: &str, parameters: &[NamedTensor]) -> Error {
    const SHOWN: usize = 8;
    let names: Vec<&str> =
        parameters.iter().take(SHOWN).map(|parameter| parameter.name.as_str()).collect();
    let more = if parameters.len() > SHOWN { ", …" } else { "" };
    Error::invalid_argument(format!(
        "the pattern `{pattern}` of an optimizer matches no parameter that is trained; there are \
         {}{more}",
        names.join(", ")
    ))
}

/// Returns `true` for biases and weights of norms, judged by names and shapes, because the layers are unknown here. A
/// norm over several dimensions has a bias of its weight's shape; no other layer has.
fn is_norm_or_bias(parameters: &[NamedTensor], index: usize) -> bool {
    let NamedTensor { name, tensor } = &parameters[index];
    let (layer, last) = name.rsplit_once('.').unwrap_or(("", name));
    let has_bias_like_it = || {
        parameters.iter().any(|other| {
            other.name.rsplit_once('.') == Some((layer, "bias"))
                && other.tensor.size() == tensor.size()
        })
    };
    last == "bias" || tensor.dim() < 2 || has_bias_like_it()
}
