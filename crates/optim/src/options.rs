//! What all optimizers can be asked for: a learning rate, a weight decay, and parameter groups.

use std::ops::Range;

use brigade_torch::{Error, NamedTensor, Result, Trainable};

use crate::group::{Group, ParameterGroup};
use crate::inner::OptimizerInner;
use crate::lookahead::Lookahead;
use crate::optimizer::Optimizer;
use crate::rule::Rule;

/// The settings that every optimizer has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    pub(crate) groups: Vec<Group>,
    /// Patterns of names, whether they choose or leave out.
    pub(crate) selection: Vec<(String, bool)>,
    pub(crate) no_decay_on_norms_and_biases: bool,
    /// Names of the parameters without weight decay, for a caller that knows the layers.
    pub(crate) without_decay: Option<Vec<String>>,
    pub(crate) decay: WeightDecay,
    pub(crate) lookahead: Option<Lookahead>,
}

/// What weight decay is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightDecay {
    /// A part of the gradient: the weight times the decay.
    Added,
    /// The weight shrinks by the rate times the decay before each step.
    Decoupled,
}

impl WeightDecay {
    pub(crate) fn as_number(self) -> f64 {
        f64::from(u8::from(self == Self::Decoupled))
    }
}

/// The settings of an optimizer of any kind, for code that lets its caller choose one: every builder of this crate.
///
/// ```
/// use brigade_optim::{AdamW, NamedTensor, OptimizerSettings, Overrides, Sgd};
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let parameters = [NamedTensor { name: "weight".to_owned(), tensor: weight }];
/// let choices: [Box<dyn OptimizerSettings>; 2] = [Box::new(AdamW::default()), Box::new(Sgd::new(0.1))];
/// for settings in choices {
///     let overrides = Overrides { lr: Some(0.5), ..Default::default() };
///     assert_eq!(settings.build_with(&parameters, overrides)?.lr(), 0.5);
/// }
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait OptimizerSettings: std::fmt::Debug + Send + Sync {
    /// Returns the learning rate of the settings.
    fn settings_lr(&self) -> f64;

    /// Makes an optimizer of these parameters, with some settings replaced.
    ///
    /// # Errors
    /// As `build` of the settings.
    fn build_with(&self, parameters: &[NamedTensor], overrides: Overrides) -> Result<Optimizer>;
}

/// What [`OptimizerSettings::build_with`] replaces: nothing unless set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides {
    /// The learning rate.
    pub lr: Option<f64>,
    /// The weight decay.
    pub weight_decay: Option<f64>,
    /// Whether norms and biases have no weight decay.
    pub no_decay_on_norms_and_biases: Option<bool>,
    /// The names of the parameters that have no weight decay, in place of the rule for norms and biases: for a caller
    /// that knows the layers.
    pub without_decay: Option<Vec<String>>,
    /// Parameter groups, in place of the settings' own where there is one.
    pub groups: Vec<Group>,
}

impl Overrides {
    pub(crate) fn apply(self, options: &mut Options) {
        options.lr = self.lr.unwrap_or(options.lr);
        options.weight_decay = self.weight_decay.unwrap_or(options.weight_decay);
        options.no_decay_on_norms_and_biases =
            self.no_decay_on_norms_and_biases.unwrap_or(options.no_decay_on_norms_and_biases);
        options.without_decay = self.without_decay.or_else(|| options.without_decay.take());
        if !self.groups.is_empty() {
            options.groups = self.groups;
        }
    }
}

/// What the options of every optimizer are set with.
macro_rules! common_options {
    ($($header:tt)*) => {
        $($header)* {
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
        }
    };
}
pub(crate) use common_options;

/// The settings of an optimizer with a rule of one's own; made by [`Optimizer::with_rule`].
#[derive(Debug)]
#[must_use]
pub struct OptimizerBuilder<R> {
    options: Options,
    rule: R,
    momentum: f64,
}

common_options!(impl<R: Rule + 'static> OptimizerBuilder<R>);

impl<R: Rule + 'static> OptimizerBuilder<R> {
    pub(crate) fn new(rule: R, lr: f64) -> Self {
        Self { options: Options::new(lr), rule, momentum: 0.0 }
    }

    /// The momentum of groups that have none of their own; 0 unless set.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// Makes the optimizer of a model's trained parameters, or of a list of named ones.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a number out of range, a model without a trained parameter,
    /// a group whose pattern matches no parameter, and a parameter that the rule refuses.
    pub fn build(self, parameters: &(impl Trainable + ?Sized)) -> Result<Optimizer> {
        check("the momentum", self.momentum, 0.0..f64::INFINITY)?;
        self.options.build(self.rule, self.momentum, parameters)
    }
}

impl<R: Rule + Clone + Sync + 'static> OptimizerSettings for OptimizerBuilder<R> {
    fn settings_lr(&self) -> f64 {
        self.options.lr
    }

    fn build_with(&self, parameters: &[NamedTensor], overrides: Overrides) -> Result<Optimizer> {
        let Self { mut options, rule, momentum } = Self {
            options: self.options.clone(),
            rule: self.rule.clone(),
            momentum: self.momentum,
        };
        overrides.apply(&mut options);
        Self { options, rule, momentum }.build(parameters)
    }
}

/// Parameters in their groups.
#[derive(Debug)]
pub(crate) struct Grouping {
    pub(crate) groups: Vec<ParameterGroup>,
    /// The indices of each group's parameters.
    pub(crate) members: Vec<Vec<usize>>,
    /// Which of the options' groups each is (0 is the rest), and whether it is the half without decay.
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

    /// Options whose weight decay shrinks the weights.
    pub(crate) fn decoupled(lr: f64) -> Self {
        Self { decay: WeightDecay::Decoupled, ..Self::new(lr) }
    }

    pub(crate) fn build(
        &self,
        rule: impl Rule + 'static,
        momentum: f64,
        model: &(impl Trainable + ?Sized),
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
        let grouping = self.grouping(momentum, &parameters);
        let inner =
            OptimizerInner::new(Box::new(rule), self.clone(), momentum, parameters, grouping);
        Ok(Optimizer::new(inner))
    }

    /// Puts parameters into the groups that match them; groups that would be empty are left out.
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

    /// Whether `only` and `except` leave it in.
    pub(crate) fn selects(&self, name: &str) -> bool {
        let any = |chooses: bool| {
            self.selection.iter().any(|(pattern, c)| *c == chooses && matches(pattern, name))
        };
        let chooses = self.selection.iter().any(|(_, chooses)| *chooses);
        (!chooses || any(true)) && !any(false)
    }

    /// A pattern of `only` or `except` that matches nothing is a slip.
    fn check_patterns(&self, parameters: &[NamedTensor]) -> Result<()> {
        let none = |pattern: &str| !parameters.iter().any(|it| matches(pattern, &it.name));
        match self.selection.iter().find(|(pattern, _)| none(pattern)) {
            Some((pattern, _)) => Err(no_match(pattern, parameters)),
            None => Ok(()),
        }
    }

    /// So is a group that nothing is left for.
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

    /// The indices of each group's parameters; first of those that no group takes.
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

/// Whether the whole name fits: `*` stands for any characters, `?` for one.
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

/// Layers are not known here, so names and shapes must tell. A norm over several dimensions has a bias
/// of its weight's shape; no other layer has.
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

/// Rejects decay rates of running means that are out of range or NaN.
pub(crate) fn check_betas((first, second): (f64, f64)) -> Result<()> {
    check("the first beta", first, 0.0..1.0)?;
    check("the second beta", second, 0.0..1.0)
}

/// Rejects hyperparameters that are out of range or NaN.
pub(crate) fn check(name: &str, value: f64, allowed: Range<f64>) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{name} is {value}, but must be at least {} and below {}",
        allowed.start, allowed.end
    )))
}
