//! The settings of an optimizer of any kind, and those of an optimizer with a user-defined rule.

use std::fmt;

use brigade_torch::{NamedTensor, Trainable};

use crate::check::check;
use crate::group::Group;
use crate::optimizer::Optimizer;
use crate::options::{Options, common_options};
use crate::rule::Rule;
#[cfg(doc)]
use brigade_torch::Error;
use brigade_torch::Result;

/// Settings of an optimizer of any kind, for code whose caller chooses the optimizer. Every builder of this crate
/// implements it.
///
/// ```
/// use brigade_optim::{AdamW, OptimizerSettings, Overrides, Sgd};
/// use brigade_torch::NamedTensor;
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
pub trait OptimizerSettings: fmt::Debug + Send + Sync {
    /// Returns the learning rate of the settings.
    fn settings_lr(&self) -> f64;

    /// Builds an optimizer for these parameters, with some settings replaced.
    ///
    /// # Errors
    /// Returns the same errors as `build` of the settings.
    fn build_with(&self, parameters: &[NamedTensor], overrides: Overrides) -> Result<Optimizer>;
}

/// Overrides of an optimizer's settings for [`OptimizerSettings::build_with`]. By default nothing is replaced.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides {
    /// Learning rate that replaces the settings' one.
    pub lr: Option<f64>,
    /// Weight decay that replaces the settings' one.
    pub weight_decay: Option<f64>,
    /// `true` if norms and biases are exempt from weight decay.
    pub no_decay_on_norms_and_biases: Option<bool>,
    /// Names of the parameters that are exempt from weight decay, in place of the rule for norms and biases, for a
    /// caller that has the list of layers.
    pub without_decay: Option<Vec<String>>,
    /// Parameter groups that replace the settings' groups, unless the list is empty.
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

/// Settings of an optimizer with a user-defined rule. Created by [`Optimizer::with_rule`].
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

    /// Sets the momentum of groups that have none of their own. Defaults to 0.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// Builds the optimizer for the trained parameters of a model, or for a list of named parameters.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a number out of range, a model without a trained parameter, a
    /// group whose pattern matches no parameter, and a parameter that the rule rejects.
    pub fn build(self, parameters: &(impl Trainable + ?Sized)) -> Result<Optimizer> {
        check("the momentum", self.momentum, 0.0..f64::INFINITY)?;
        Optimizer::from_options(&self.options, self.rule, self.momentum, parameters)
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
