//! Parameter groups: parameters with hyperparameters of their own.

use std::collections::BTreeMap;

/// Parameters chosen by name that get a learning rate, weight decay or momentum of their own.
///
/// ```
/// use brigade_optim::{AdamW, Group};
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
/// let optimizer = AdamW::default()
///     .lr(1e-3)
///     .group(Group::matching("module1.*").lr(1e-4))
///     .no_decay_on_norms_and_biases(true)
///     .build(&model)?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct Group {
    pub(crate) patterns: Vec<String>,
    pub(crate) lr: Option<f64>,
    pub(crate) weight_decay: Option<f64>,
    pub(crate) momentum: Option<f64>,
}

impl Group {
    /// Creates a group of the parameters whose whole name matches the pattern: `*` stands for any number of any
    /// characters, including dots, `?` for one character. A parameter that several groups match belongs to the first of
    /// them.
    pub fn matching(pattern: impl Into<String>) -> Self {
        Self { patterns: vec![pattern.into()], lr: None, weight_decay: None, momentum: None }
    }

    /// Adds the parameters that match another pattern.
    pub fn or(mut self, pattern: impl Into<String>) -> Self {
        self.patterns.push(pattern.into());
        self
    }

    /// Sets the group's learning rate. Defaults to the optimizer's. A schedule keeps the ratio of the two.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = Some(lr);
        self
    }

    /// Sets the group's weight decay. Defaults to the optimizer's.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }

    /// Sets the group's momentum, or first beta for Adam and its variants. Defaults to the optimizer's. A schedule that
    /// changes the momentum changes it for all groups.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = Some(momentum);
        self
    }
}

/// A group of an optimizer's parameters, and the hyperparameters of its next step.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterGroup {
    pub(crate) names: Vec<String>,
    pub(crate) initial_lr: f64,
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    pub(crate) momentum: f64,
    /// `true` if this is the half of a group that never decays: norms and biases.
    pub(crate) exempt: bool,
}

impl ParameterGroup {
    /// Returns the names of the group's parameters, in the model's order.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the learning rate.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// Returns the learning rate before any schedule.
    #[must_use]
    pub fn initial_lr(&self) -> f64 {
        self.initial_lr
    }

    /// Returns the weight decay.
    #[must_use]
    pub fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    /// Returns the momentum, or the first beta of Adam and its variants.
    #[must_use]
    pub fn momentum(&self) -> f64 {
        self.momentum
    }

    /// Returns `true` if these are the norms and biases that `no_decay_on_norms_and_biases` exempts from weight decay.
    #[must_use]
    pub fn is_exempt_from_decay(&self) -> bool {
        self.exempt
    }

    /// Returns the group's hyperparameters under PyTorch's names.
    pub(crate) fn numbers(&self, momentum_name: Option<&str>) -> BTreeMap<String, f64> {
        let mut numbers = BTreeMap::from([
            ("lr".to_owned(), self.lr),
            ("initial_lr".to_owned(), self.initial_lr),
            ("weight_decay".to_owned(), self.weight_decay),
        ]);
        if let Some(name) = momentum_name {
            numbers.insert(name.to_owned(), self.momentum);
        }
        numbers
    }

    /// Sets the hyperparameters from checked values.
    pub(crate) fn load(&mut self, numbers: &BTreeMap<String, f64>, momentum_name: Option<&str>) {
        let take = |name: &str, to: &mut f64| {
            if let Some(&number) = numbers.get(name) {
                *to = number;
            }
        };
        take("lr", &mut self.lr);
        take("initial_lr", &mut self.initial_lr);
        take("weight_decay", &mut self.weight_decay);
        if let Some(name) = momentum_name {
            take(name, &mut self.momentum);
        }
    }
}
