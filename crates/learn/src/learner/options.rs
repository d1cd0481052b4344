//! Options of a Learner.

use std::sync::Arc;

use brigade_metrics::IntoMetrics;
use brigade_optim::OptimizerSettings;
use brigade_sharding::Sharding;
use brigade_torch::{Error, Result};
use brigade_train::{ModelSetting, Precision};

use super::Learner;
use crate::loss::Loss;

impl Learner {
    /// Sets the metrics: one, or a tuple of several. Defaults to none.
    #[must_use]
    pub fn metrics(mut self, metrics: impl IntoMetrics) -> Self {
        self.state.metrics = metrics.into_metrics();
        self
    }

    /// Sets the loss, which replaces the data's default.
    #[must_use]
    pub fn loss(mut self, loss: impl Loss + 'static) -> Self {
        self.state.loss = Arc::new(loss);
        self
    }

    /// Sets the optimizer: any of `brigade_optim`'s settings, or those of a custom update rule. Its parameter groups
    /// are replaced by the Learner's. Defaults to fastai's Adam (`AdamW::fastai()`).
    #[must_use]
    pub fn optimizer(mut self, settings: impl OptimizerSettings + 'static) -> Self {
        self.state.grouped.set_settings(Arc::new(settings));
        self
    }

    /// Sets the learning rate of fits for which none is given. Defaults to the optimizer's.
    #[must_use]
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = Some(lr);
        self
    }

    /// Sets the weight decay. Defaults to the optimizer's.
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.state.grouped.options.weight_decay = Some(weight_decay);
        self
    }

    /// Sets whether norms and biases have weight decay as well (fastai's `wd_bn_bias`). Defaults to `false`.
    #[must_use]
    pub fn decay_norms_and_biases(mut self, on: bool) -> Self {
        self.state.grouped.options.decay_norms_and_biases = on;
        self
    }

    /// Sets whether normalisations are trained in frozen groups (fastai's `train_bn`). Defaults to `true`.
    #[must_use]
    pub fn train_norms(mut self, on: bool) -> Self {
        self.state.grouped.options.train_norms = on;
        self
    }

    /// Sets the momentum at the beginning, at the highest rate and at the end of a cycle. Defaults to 0.95, 0.85 and
    /// 0.95.
    #[must_use]
    pub fn momenta(mut self, momenta: [f64; 3]) -> Self {
        self.momenta = momenta;
        self
    }

    /// Divides the parameters into groups, each a list of names, from the input side to the output side: for
    /// discriminative learning rates and for freezing (fastai's `splitter`).
    ///
    /// # Errors
    /// Fails when a parameter is in no group or in two, or a name is unknown.
    pub fn split_parameters(mut self, groups: Vec<Vec<String>>) -> Result<Self> {
        let parameters = self.state.model.parameters();
        self.state.grouped.set_groups(groups, &parameters)?;
        Ok(self)
    }

    /// Divides the parameters into groups by the prefixes of their names, a list of prefixes for each group.
    ///
    /// ```no_run
    /// # fn f(learner: brigade_learn::Learner) -> brigade_torch::Result<()> {
    /// let learner = learner.split_by_prefix(&[&["stem", "layer1"], &["layer2"], &["head"]])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::split_parameters`].
    pub fn split_by_prefix(self, groups: &[&[&str]]) -> Result<Self> {
        let parameters = self.state.model.parameters();
        let below = |prefix: &str, name: &str| {
            name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let members = |prefixes: &&[&str]| {
            let inside = parameters
                .iter()
                .filter(|parameter| prefixes.iter().any(|prefix| below(prefix, &parameter.name)));
            inside.map(|it| it.name.clone()).collect()
        };
        let groups = groups.iter().map(members).collect();
        self.split_parameters(groups)
    }

    /// Sets the precision of the forward pass. Defaults to the Accelerator's.
    ///
    /// # Errors
    /// Fails when the device has no such precision.
    pub fn mixed_precision(self, precision: Precision) -> Result<Self> {
        self.set_for_model(ModelSetting::MixedPrecision(precision))
    }

    /// Sets how the model is sharded over the ranks; `None` keeps the whole model on each. Defaults to the
    /// Accelerator's setting. A [deferred](brigade_nn::Model::deferred) model is never whole in any rank's memory.
    ///
    /// ```no_run
    /// use brigade_sharding::Sharding;
    /// # fn f(learner: brigade_learn::Learner) -> brigade_torch::Result<()> {
    /// let mut learner = learner.sharding(Sharding::zero3())?;
    /// learner.fit_one_cycle(2, 1e-3, ())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Fails when the shard size does not divide the ranks, if the types contradict the precision, or if the model is
    /// sharded already.
    pub fn sharding(self, sharding: impl Into<Option<Sharding>>) -> Result<Self> {
        if self.state.model.is_prepared() {
            return Err(Error::invalid_argument(
                "`sharding` comes after the model was prepared: call it when the Learner is made, before its first fit",
            ));
        }
        self.set_for_model(ModelSetting::Sharding(sharding.into()))
    }

    /// Sets whether convolutional models and their images have their channels last in memory. Defaults to the faster
    /// format. Results are equal up to rounding.
    ///
    /// # Errors
    /// Returns the same errors as [`Accelerator::with_model_setting`](brigade_train::Accelerator::with_model_setting).
    pub fn channels_last(self, on: bool) -> Result<Self> {
        self.set_for_model(ModelSetting::ChannelsLast(on))
    }

    fn set_for_model(mut self, setting: ModelSetting) -> Result<Self> {
        self.state.accelerator = self.state.accelerator.with_model_setting(setting)?;
        Ok(self)
    }

    /// Sets whether metrics of the training batches are recorded as well (fastai's `train_metrics`). Defaults to
    /// `false`.
    #[must_use]
    pub fn train_metrics(mut self, on: bool) -> Self {
        self.recording.train_metrics = on;
        self.state.train_metrics = on;
        self
    }

    /// Sets whether loss and metrics of the validation are recorded. Defaults to `true`.
    #[must_use]
    pub fn valid_metrics(mut self, on: bool) -> Self {
        self.recording.valid_metrics = on;
        self
    }

    /// Adds callbacks for all fits.
    #[must_use]
    pub fn with(mut self, callbacks: impl crate::callback::IntoCallbacks) -> Self {
        self.add(callbacks);
        self
    }

    /// Sets whether progress bars and the table of epochs are left out. Defaults to `false`.
    #[must_use]
    pub fn quiet(mut self, quiet: bool) -> Self {
        self.state.quiet = quiet;
        self
    }

    /// Sets the seed of the random draws of callbacks, such as MixUp's shares. Defaults to 42.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.state.seed = seed;
        self
    }
}
