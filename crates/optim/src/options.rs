//! What all optimizers can be asked for: a learning rate, a weight decay, and parameter groups.

use std::ops::Range;

use brigade_models::NamedTensor;

use super::core::{Core, Rule};
use super::group::{Group, ParameterGroup};
use super::lookahead::{Lookahead, SLOW};
use super::places::Places;
use super::{Optimizer, Trainable};
use crate::error::{Error, Result};

/// The settings that every optimizer has.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Options {
    pub(super) lr: f64,
    pub(super) weight_decay: f64,
    pub(super) groups: Vec<Group>,
    /// Patterns of names, whether they choose or leave out.
    pub(super) selection: Vec<(String, bool)>,
    pub(super) no_decay_on_norms_and_biases: bool,
    pub(super) decay: Decay,
    pub(super) lookahead: Option<Lookahead>,
}

/// What weight decay is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decay {
    /// A part of the gradient: the weight times the decay.
    Added,
    /// The weight shrinks by the rate times the decay before each step.
    Decoupled,
}

impl Decay {
    /// What is added to the gradient, times the weight, and what the weight is multiplied by.
    pub(super) fn split(self, lr: f64, weight_decay: f64) -> (f64, f64) {
        match self {
            Self::Added => (weight_decay, 1.0),
            Self::Decoupled => (0.0, 1.0 - lr * weight_decay),
        }
    }

    pub(super) fn as_number(self) -> f64 {
        f64::from(u8::from(self == Self::Decoupled))
    }
}

/// The methods that every optimizer's builder has: it must have a field `options`, and give its rule
/// and momentum in `fn rule(&self) -> Result<(impl Rule, f64)>`.
macro_rules! builder {
    ($builder:ident, decoupled) => {
        builder!($builder);

        impl $builder {
            /// The weight decay shrinks the weight by the learning rate times the decay before each step,
            /// instead of being added to the gradient.
            pub fn decoupled_weight_decay(mut self, on: bool) -> Self {
                use $crate::optim::options::Decay;
                self.options.decay = if on { Decay::Decoupled } else { Decay::Added };
                self
            }
        }
    };
    ($builder:ident) => {
        impl $builder {
            /// The learning rate.
            pub fn lr(mut self, lr: f64) -> Self {
                self.options.lr = lr;
                self
            }

            /// The weight decay.
            pub fn weight_decay(mut self, weight_decay: f64) -> Self {
                self.options.weight_decay = weight_decay;
                self
            }

            /// Gives parameters chosen by name numbers of their own. May be called several times.
            pub fn group(mut self, group: $crate::Group) -> Self {
                self.options.groups.push(group);
                self
            }

            /// No weight decay on biases and on the weights of norms: on parameters that are called
            /// `bias`, have a bias of their own shape beside them, or have fewer than two dimensions.
            pub fn no_decay_on_norms_and_biases(mut self, on: bool) -> Self {
                self.options.no_decay_on_norms_and_biases = on;
                self
            }

            /// Steps only the parameters whose name matches (see [`Group::matching`](crate::Group::matching));
            /// called again, those as well.
            pub fn only(mut self, pattern: impl Into<String>) -> Self {
                self.options.selection.push((pattern.into(), true));
                self
            }

            /// Leaves the parameters out whose name matches.
            pub fn except(mut self, pattern: impl Into<String>) -> Self {
                self.options.selection.push((pattern.into(), false));
                self
            }

            /// Slow weights that follow the optimizer's.
            pub fn lookahead(mut self, lookahead: $crate::Lookahead) -> Self {
                self.options.lookahead = Some(lookahead);
                self
            }

            /// The optimizer of a model's trained parameters.
            ///
            /// # Errors
            /// [`crate::Error::Misuse`] for a number out of range, a model without a trained parameter,
            /// and a group whose pattern matches no parameter.
            pub fn build(
                &self,
                model: &impl $crate::optim::Trainable,
            ) -> $crate::error::Result<$crate::optim::Optimizer> {
                let (rule, momentum) = self.rule()?;
                self.options.build(rule, momentum, model)
            }
        }
    };
}
pub(super) use builder;

impl Options {
    pub(super) fn new(lr: f64) -> Self {
        Self {
            lr,
            weight_decay: 0.0,
            groups: Vec::new(),
            selection: Vec::new(),
            no_decay_on_norms_and_biases: false,
            decay: Decay::Added,
            lookahead: None,
        }
    }

    pub(super) fn build(
        &self,
        rule: impl Rule + 'static,
        momentum: f64,
        model: &impl Trainable,
    ) -> Result<Optimizer> {
        check("the learning rate", self.lr, 0.0..f64::INFINITY)?;
        check("the weight decay", self.weight_decay, 0.0..f64::INFINITY)?;
        for group in &self.groups {
            group.check(&rule)?;
        }
        if let Some(lookahead) = self.lookahead {
            lookahead.check()?;
        }
        let mut parameters = model.trainable_parameters();
        if parameters.is_empty() {
            return Err(Error::Misuse(
                "an optimizer needs a parameter that is trained; this model has none".into(),
            ));
        }
        self.select(&mut parameters)?;
        for parameter in &parameters {
            rule.takes(&parameter.name, &parameter.tensor.size())?;
        }
        let mut groups = Vec::new();
        let mut members = Vec::new();
        for (group, places) in self.split(&parameters)? {
            let number = |own: fn(&Group) -> Option<f64>, all| group.and_then(own).unwrap_or(all);
            let lr = number(|group| group.lr, self.lr);
            let weight_decay = number(|group| group.weight_decay, self.weight_decay);
            let momentum = number(|group| group.momentum, momentum);
            let (plain, decayed): (Vec<usize>, Vec<usize>) =
                places.into_iter().partition(|&place| {
                    self.no_decay_on_norms_and_biases && is_norm_or_bias(&parameters, place)
                });
            for (places, weight_decay) in [(decayed, weight_decay), (plain, 0.0)] {
                if places.is_empty() {
                    continue;
                }
                let names = places.iter().map(|&place| parameters[place].name.clone()).collect();
                groups.push(ParameterGroup { names, initial_lr: lr, lr, weight_decay, momentum });
                members.push(places);
            }
        }
        let slots = rule.slots().iter().copied().chain(self.lookahead.map(|_| SLOW)).collect();
        let places = Places::new(slots, parameters.len());
        Ok(Optimizer::new(Core {
            rule: Box::new(rule),
            parameters,
            groups,
            members,
            places,
            lookahead: self.lookahead,
            initial_lr: self.lr,
            lr: self.lr,
            steps: 0,
        }))
    }

    fn select(&self, parameters: &mut Vec<NamedTensor>) -> Result<()> {
        for (pattern, _) in &self.selection {
            if !parameters.iter().any(|parameter| matches(pattern, &parameter.name)) {
                return Err(no_match(pattern, parameters));
            }
        }
        let any = |chooses: bool, name: &str| {
            self.selection.iter().any(|(pattern, c)| *c == chooses && matches(pattern, name))
        };
        let chooses = self.selection.iter().any(|(_, chooses)| *chooses);
        parameters.retain(|p| (!chooses || any(true, &p.name)) && !any(false, &p.name));
        if parameters.is_empty() {
            return Err(Error::Misuse(
                "`except` leaves out every parameter that the optimizer would step".into(),
            ));
        }
        Ok(())
    }

    /// The places of each group's parameters; first of those that no group takes.
    fn split(&self, parameters: &[NamedTensor]) -> Result<Vec<(Option<&Group>, Vec<usize>)>> {
        let mut left: Vec<usize> = (0..parameters.len()).collect();
        let mut groups = Vec::new();
        for group in &self.groups {
            for pattern in &group.patterns {
                if !parameters.iter().any(|parameter| matches(pattern, &parameter.name)) {
                    return Err(no_match(pattern, parameters));
                }
            }
            let taken = |place: &usize| {
                group.patterns.iter().any(|pattern| matches(pattern, &parameters[*place].name))
            };
            let (ours, others): (Vec<usize>, Vec<usize>) =
                left.iter().partition(|place| taken(place));
            if ours.is_empty() {
                return Err(Error::Misuse(format!(
                    "the parameter group {:?} is empty: groups before it take all that it matches",
                    group.patterns
                )));
            }
            left = others;
            groups.push((Some(group), ours));
        }
        groups.insert(0, (None, left));
        Ok(groups)
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
            (Some(_), None) => Err(Error::Misuse(format!(
                "{} is set, but {} has no momentum",
                of("the momentum"),
                rule.name()
            ))),
            (Some(momentum), Some("beta1")) => check(&of("the first beta"), momentum, 0.0..1.0),
            (Some(momentum), _) => check(&of("the momentum"), momentum, 0.0..f64::INFINITY),
        }
    }
}

/// Whether the whole name fits: `*` stands for any characters, `?` for one.
fn matches(pattern: &str, name: &str) -> bool {
    wildmatch::WildMatch::new(pattern).matches(name)
}

fn no_match(pattern: &str, parameters: &[NamedTensor]) -> Error {
    const SHOWN: usize = 8;
    let names: Vec<&str> =
        parameters.iter().take(SHOWN).map(|parameter| parameter.name.as_str()).collect();
    let more = if parameters.len() > SHOWN { ", …" } else { "" };
    Error::Misuse(format!(
        "the pattern `{pattern}` of an optimizer matches no parameter that is trained; there are \
         {}{more}",
        names.join(", ")
    ))
}

/// Layers are not known here, so names and shapes must tell. A norm over several dimensions has a bias
/// of its weight's shape; no other layer has.
fn is_norm_or_bias(parameters: &[NamedTensor], place: usize) -> bool {
    let NamedTensor { name, tensor } = &parameters[place];
    let (layer, last) = name.rsplit_once('.').unwrap_or(("", name));
    let has_bias_like_it = || {
        parameters.iter().any(|other| {
            other.name.rsplit_once('.') == Some((layer, "bias"))
                && other.tensor.size() == tensor.size()
        })
    };
    last == "bias" || tensor.dim() < 2 || has_bias_like_it()
}

/// Refuses learning rates and the like that can only be slips.
pub(super) fn check(name: &str, value: f64, allowed: Range<f64>) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    Err(Error::Misuse(format!(
        "{name} is {value}, but must be at least {} and below {}",
        allowed.start, allowed.end
    )))
}
