//! The handle of an optimizer that programs hold.

mod settings;

use std::fmt;
use std::sync::Arc;

use brigade_torch::{NamedTensor, ProcessGroup, Result, Trainable};
use parking_lot::{Mutex, MutexGuard};
use tch::Tensor;

use crate::check::check;
use crate::device_scalars::DeviceScalars;
use crate::group::ParameterGroup;
use crate::inner::OptimizerInner;
use crate::options::Options;
use crate::parts::StepParts;
use crate::rule::Rule;
use crate::state::{OptimizerState, StateMismatch};

pub use settings::{OptimizerBuilder, OptimizerSettings, Overrides};

/// Optimizer: updates parameters by their gradients. It is created by `build` of [`Adam`](crate::Adam),
/// [`Sgd`](crate::Sgd) and the others, or by [`Optimizer::with_rule`] with a user-defined rule.
///
/// It holds the parameters themselves and follows them to another device. A clone is a second handle of the same
/// optimizer, as held by schedulers and checkpoints.
#[derive(Clone)]
pub struct Optimizer {
    inner: Arc<Mutex<OptimizerInner>>,
}

impl Optimizer {
    /// Creates the optimizer of a model's trained parameters.
    pub(crate) fn from_options(
        options: &Options,
        rule: impl Rule + 'static,
        momentum: f64,
        model: &(impl Trainable + ?Sized),
    ) -> Result<Self> {
        model.check_trainable()?;
        let parameters = options.choose(&rule, model)?;
        let grouping = options.grouping(momentum, &parameters);
        let inner =
            OptimizerInner::new(Box::new(rule), options.clone(), momentum, parameters, grouping);
        Ok(Self { inner: Arc::new(Mutex::new(inner)) })
    }

    /// Creates settings of an optimizer with a user-defined rule and this learning rate. See [`Rule`] for an example.
    pub fn with_rule<R: Rule + 'static>(rule: R, lr: f64) -> OptimizerBuilder<R> {
        OptimizerBuilder::new(rule, lr)
    }

    /// Makes an optimizer step: updates every parameter that has a gradient. A parameter without a gradient and its
    /// state stay unchanged.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if a kernel fails; [`brigade_torch::ErrorKind::InvalidArgument`], with
    /// nothing changed, if a schedule has set a learning rate or momentum that is negative or not finite.
    pub fn step(&mut self) -> Result<()> {
        self.lock().step(&DeviceScalars::default())
    }

    /// Makes an optimizer step with a learning rate, loss scale and `found_inf` that are tensors on the parameters'
    /// device. The host does not wait for their values; whether the step is skipped is decided on the device. From then
    /// on steps are counted on the device; [`Optimizer::steps`], [`Optimizer::state_dict`] and the next
    /// [`Optimizer::step`] wait for the count.
    ///
    /// Parameters on the CPU are updated by the same operations, more slowly than by [`Optimizer::step`].
    ///
    /// ```
    /// use brigade_optim::{Adam, DeviceScalars};
    /// use brigade_torch::NamedTensor;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let model = [NamedTensor { name: "weight".into(), tensor: weight.shallow_clone() }];
    /// let mut optimizer = Adam::default().build(&model)?;
    /// let (lr, scale) = (Tensor::from(0.25f32), Tensor::from(1024f32));
    /// for factor in [1.0, f64::INFINITY] {
    ///     optimizer.zero_grad()?;
    ///     ((&weight * factor).sum(Kind::Float) * &scale).backward();
    ///     let found = weight.grad().isfinite().all().logical_not().to_kind(Kind::Float);
    ///     optimizer.step_with(&DeviceScalars {
    ///         lr: Some(&lr),
    ///         grad_scale: Some(&scale),
    ///         found_inf: Some(&found),
    ///     })?;
    /// }
    /// assert!((weight.double_value(&[0]) - 0.75).abs() < 1e-6);
    /// assert_eq!(optimizer.steps(), 1); // the second was left out
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Optimizer::step`]; [`brigade_torch::ErrorKind::InvalidArgument`], with nothing
    /// changed, for tensors with a wrong shape, and for a rule that does not [support
    /// them](Rule::takes_device_scalars).
    pub fn step_with(&mut self, scalars: &DeviceScalars<'_>) -> Result<()> {
        self.lock().step(scalars)
    }

    /// Returns `true` if [`Optimizer::step_with`] can be called: the rule [supports scalars on a
    /// device](Rule::takes_device_scalars), and, if parameters are sharded, is [elementwise](Rule::is_elementwise).
    #[must_use]
    pub fn takes_device_scalars(&self) -> bool {
        self.lock().takes_device_scalars()
    }

    /// Returns `true` if the update of an element depends on that element alone ([`Rule::is_elementwise`]), so that
    /// shards of parameters are updated exactly as whole parameters are.
    #[must_use]
    pub fn is_elementwise(&self) -> bool {
        self.lock().rule.is_elementwise()
    }

    /// Returns the name of the rule, such as `AdamW`.
    #[must_use]
    pub fn rule_name(&self) -> &'static str {
        self.lock().rule.name()
    }

    /// Removes all gradients, like PyTorch's `zero_grad(set_to_none=True)`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if libtorch fails.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.lock().zero_grad()
    }

    /// Returns the learning rate of the next step for parameters whose group has no learning rate of its own.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.lock().lr
    }

    /// Sets the learning rate. Groups with a learning rate of their own keep its ratio to this one.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when it is negative or not finite.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        check("the learning rate", lr, 0.0..f64::INFINITY)?;
        self.lock().schedule(lr, None);
        Ok(())
    }

    /// Sets one group's learning rate. A schedule keeps its new ratio to the rates of the other groups.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when there is no such group, or the rate is negative or not
    /// finite.
    pub fn set_group_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        check("the learning rate", lr, 0.0..f64::INFINITY)?;
        self.lock().set_group_lr(group, lr)
    }

    /// Sets one group's momentum, or the first beta of Adam and its variants.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when there is no such group, or the momentum is negative or not
    /// finite.
    pub fn set_group_momentum(&mut self, group: usize, momentum: f64) -> Result<()> {
        check("the momentum", momentum, 0.0..f64::INFINITY)?;
        self.lock().group(group)?.momentum = momentum;
        Ok(())
    }

    /// Sets one group's weight decay.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when there is no such group, or the decay is negative or not
    /// finite.
    pub fn set_group_weight_decay(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        check("the weight decay", weight_decay, 0.0..f64::INFINITY)?;
        self.lock().group(group)?.weight_decay = weight_decay;
        Ok(())
    }

    /// Returns the parameter groups as they are now.
    #[must_use]
    pub fn groups(&self) -> Vec<ParameterGroup> {
        self.lock().groups.clone()
    }

    /// Returns the number of steps taken so far. After [`Optimizer::step_with`] the call waits for the device, and
    /// returns 0 if the device has failed.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.lock().steps().unwrap_or_default()
    }

    /// Returns the number of steps that were launched since the optimizer was built or loaded, including steps that the
    /// device has skipped, without waiting for the device.
    #[must_use]
    pub fn launched_steps(&self) -> u64 {
        self.lock().launched()
    }

    /// Adds `steps` to [`Optimizer::launched_steps`]: a positive number for steps that a replayed CUDA graph makes, a
    /// negative one for a step that was captured but not executed.
    pub fn count_launched(&mut self, steps: i64) {
        self.lock().count_launched(steps);
    }

    /// Returns the optimizer's state under PyTorch's names, for a checkpoint. Its tensors share the optimizer's memory;
    /// [`OptimizerState::deep_clone`] makes a snapshot.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if libtorch fails.
    pub fn state_dict(&self) -> Result<OptimizerState> {
        self.lock().state_dict()
    }

    /// Loads a state that [`Optimizer::state_dict`] returned for an optimizer of the same kind, with the same groups,
    /// of the same model.
    ///
    /// Learning rates, momenta and weight decays are taken from the state; the other hyperparameters (betas, eps, …)
    /// must agree. Tensors are copied to the parameters' device and dtype.
    ///
    /// # Errors
    /// [`crate::StateMismatch`] with the first difference. Nothing is changed then.
    pub fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        self.lock().load_state_dict(state, false)
    }

    /// Loads a state like [`Optimizer::load_state_dict`], but takes over the state's tensors without a copy if they
    /// have the required dtype, device and memory format, so that they are not in memory twice.
    ///
    /// # Errors
    /// Returns the same errors as [`Optimizer::load_state_dict`].
    #[expect(clippy::needless_pass_by_value, reason = "its tensors are the optimizer's afterwards")]
    pub fn adopt_state(&mut self, state: OptimizerState) -> Result<()> {
        self.lock().load_state_dict(&state, true)
    }

    /// Checks that a state matches this optimizer by the shapes of its tensors, which need not be in memory.
    ///
    /// # Errors
    /// Returns the first difference.
    pub fn check_state<T>(
        &self,
        state: &OptimizerState<T>,
        shape: impl Fn(&T) -> Vec<i64>,
    ) -> Result<(), StateMismatch> {
        self.lock().check_shapes(state, &shape)
    }

    /// Returns handles of the optimizer's parameters.
    #[must_use]
    pub fn parameters(&self) -> Vec<Tensor> {
        self.lock().parameters.iter().map(|parameter| parameter.tensor.shallow_clone()).collect()
    }

    /// Calls `f` with the optimizer's parameters, without creating handles.
    pub fn with_parameters<R>(&self, f: impl FnOnce(&[&Tensor]) -> R) -> R {
        f(&self.lock().tensors())
    }

    /// Returns the gradients of the parameters that have one.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if libtorch fails.
    pub fn gradients(&self) -> Result<Vec<Tensor>> {
        Ok(self.lock().gradients()?.into_iter().map(|(_, gradient)| gradient).collect())
    }

    /// Returns `true` if one of these parameters is, or was before it was frozen, a parameter of this optimizer.
    #[must_use]
    pub fn concerns(&self, model: &[NamedTensor]) -> bool {
        self.lock().concerns(model)
    }

    /// Checks that [`Optimizer::set_trained`] would succeed, without changing anything.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a parameter that the rule rejects.
    pub fn check_trained(
        &self,
        model: &[NamedTensor],
        trained: impl Fn(&NamedTensor) -> bool,
    ) -> Result<()> {
        self.lock().check_trained(model, &trained)
    }

    /// Replaces the optimizer's parameters of a model by those for which `trained` returns `true`, after some were
    /// frozen or unfrozen. `model` contains all parameters of the model in order.
    ///
    /// A new parameter joins the group that matches its name, unless `only` or `except` exclude it; the state of a
    /// frozen parameter is dropped. Groups keep their learning rates, and a group that was empty for a while has the
    /// rate that the schedule has set meanwhile. Parameters of other models stay.
    ///
    /// ```
    /// use brigade_optim::{Group, Sgd};
    /// use brigade_torch::NamedTensor;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let model = ["encoder.weight", "head.weight"].map(|name| NamedTensor {
    ///     name: name.to_owned(),
    ///     tensor: Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true),
    /// });
    /// let mut optimizer =
    ///     Sgd::new(0.1).group(Group::matching("encoder.*").lr(0.01)).build(&model)?;
    /// optimizer.set_trained(&model, |parameter| parameter.name.starts_with("head"))?;
    /// assert_eq!(optimizer.groups().len(), 1);
    /// optimizer.set_trained(&model, |_| true)?;
    /// assert_eq!(optimizer.groups()[1].lr(), 0.01);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a parameter that the rule rejects. Nothing is changed then.
    pub fn set_trained(
        &mut self,
        model: &[NamedTensor],
        trained: impl Fn(&NamedTensor) -> bool,
    ) -> Result<()> {
        let mut inner = self.lock();
        inner.check_trained(model, &trained)?;
        inner.set_trained(model, &trained);
        Ok(())
    }

    /// Replaces whole parameters by this rank's shards, under the same names and in the same groups. `shards` are pairs
    /// of a parameter and this rank's rows of it: `ceil(rows / ranks)` for each rank of the group, where the last ranks
    /// may have fewer or none. A parameter without dimensions is whole on each rank. Pairs whose parameter is not in
    /// the optimizer are ignored. For an optimizer that was built with shards, the pairs set the parameters to which
    /// the shards belong. Returns `true` if at least one parameter of the pairs is in the optimizer.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_optim::Sgd;
    /// use brigade_torch::{NamedTensor, set_gradient};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let whole = Tensor::ones([4, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let shard = Tensor::ones([4, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let parameters = [NamedTensor { name: "weight".into(), tensor: whole.shallow_clone() }];
    /// let mut optimizer = Sgd::new(0.5).build(&parameters)?;
    /// assert!(optimizer.replace_with_shards(&[(&whole, &shard)], group)?);
    /// set_gradient(&shard, &shard.ones_like())?;
    /// optimizer.step()?;
    /// assert_eq!(shard.double_value(&[0, 0]), 0.5);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`], with nothing changed, for a rule that does not [support
    /// shards](crate::Rule::steps_shards), and for an optimizer that has already made a step, because its states are
    /// those of whole parameters.
    pub fn replace_with_shards(
        &mut self,
        shards: &[(&Tensor, &Tensor)],
        group: &ProcessGroup,
    ) -> Result<bool> {
        self.lock().replace_with_shards(shards, group)
    }

    /// Makes the next steps in parts: the parameters of each part are updated together, in this order, and `after` is
    /// called with the part's index before the next is updated, also if none of them has a gradient. Parameters of no
    /// part come last. An error of `after` ends the step. Has no effect for rules that are not
    /// [elementwise](crate::Rule::is_elementwise), and with Lookahead, which writes into all parameters at the end.
    ///
    /// ```
    /// use std::sync::mpsc;
    ///
    /// use brigade_optim::Sgd;
    /// use brigade_torch::{NamedTensor, set_gradient};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let named = |name: &str| NamedTensor {
    ///     name: name.into(),
    ///     tensor: Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true),
    /// };
    /// let parameters = [named("a"), named("b")];
    /// let mut optimizer = Sgd::new(0.5).build(&parameters)?;
    /// let tensors = parameters.each_ref().map(|it| it.tensor.shallow_clone());
    /// tensors.iter().try_for_each(|it| set_gradient(it, &it.ones_like()))?;
    /// let (sender, receiver) = mpsc::channel();
    /// let [a, b] = tensors.each_ref().map(Tensor::shallow_clone);
    /// optimizer.step_in_parts(&tensors.map(|it| vec![it]), move |part| {
    ///     sender.send((part, a.double_value(&[0]), b.double_value(&[0]))).map_err(brigade_torch::Error::custom)
    /// });
    /// optimizer.step()?;
    /// drop(optimizer);
    /// assert_eq!(receiver.iter().collect::<Vec<_>>(), [(0, 0.5, 1.0), (1, 0.5, 0.5)]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn step_in_parts(
        &mut self,
        parts: &[Vec<Tensor>],
        after: impl FnMut(usize) -> Result<()> + Send + 'static,
    ) {
        self.lock().parts = Some(StepParts::new(parts, after));
    }

    /// Returns the names and whole shapes of the state tensors that are sharded along the first dimension together with
    /// a parameter of this size. The names are those in [`OptimizerState`]. All other state tensors of the parameter
    /// are the same on all ranks.
    ///
    /// ```
    /// use brigade_optim::Adafactor;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let optimizer = Adafactor::default().build(&model)?;
    /// assert_eq!(optimizer.spread_slots(&[5, 7]), [("row_var", vec![5, 1])]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn spread_slots(&self, size: &[i64]) -> Vec<(&'static str, Vec<i64>)> {
        self.lock().spread_slots(size)
    }

    /// Locks the data that all handles share.
    pub(crate) fn lock(&self) -> MutexGuard<'_, OptimizerInner> {
        self.inner.lock()
    }
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock().fmt(f)
    }
}
