//! The update rule of an optimizer: the trait for custom optimizers, and the arguments of its methods.

use std::fmt;

use brigade_torch::{DeviceNumbers, Error, Result, TensorId};
use tch::{Device, Tensor};

use crate::param_state::{ParamStates, STEP_KIND, like};
use crate::shards::Shards;

/// Update rule of an optimizer: the arithmetic by which a parameter changes along its gradient.
///
/// The state of each parameter between steps is in named *slots*, which belong to the optimizer: it saves them, loads
/// them, and moves them to another device or memory format with the parameter. Groups, the learning rate, weight decay
/// and momentum of each, schedules, checkpoints, and after `prepare` accumulation, loss scaling and loss checks work
/// with every rule. [`Optimizer::with_rule`] creates an optimizer from a rule.
///
/// ```
/// use brigade_optim::{Group, Optimizer, Rule, Step};
/// use brigade_torch::NamedTensor;
/// use brigade_torch::Result;
/// use tch::{Device, Kind, Tensor};
///
/// /// Lion (Chen et al., 2023): the sign of a running mean.
/// #[derive(Debug)]
/// struct Lion { beta2: f64 }
///
/// impl Rule for Lion {
///     fn name(&self) -> &'static str { "Lion" }
///
///     fn slots(&self) -> &'static [&'static str] { &["exp_avg"] }
///
///     // The first beta is what a schedule's momentum sets, and groups may have one of their own.
///     fn momentum_name(&self) -> Option<&'static str> { Some("beta1") }
///
///     fn hyperparameters(&self) -> Vec<(&'static str, f64)> { vec![("beta2", self.beta2)] }
///
///     fn step(&self, step: &mut Step<'_>) -> Result<()> {
///         step.fill_missing(0)?; // zeros, before the first step
///         let (lr, beta1, keep) = (step.lr(), step.momentum(), 1.0 - step.lr() * step.weight_decay());
///         step.each(|parameter, gradient, slots| {
///             let mut mean = slots.require(0)?.shallow_clone();
///             let update = (&mean * beta1 + gradient * (1.0 - beta1)).f_sign()?;
///             let mut parameter = parameter.shallow_clone();
///             let _ = parameter.f_mul_scalar_(keep)?.f_sub_(&(update * lr))?;
///             mean.f_copy_(&(&mean * self.beta2 + gradient * (1.0 - self.beta2)))?;
///             Ok(())
///         })
///     }
/// }
///
/// let weight = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let parameters = [NamedTensor { name: "head.weight".into(), tensor: weight }];
/// let mut optimizer = Optimizer::with_rule(Lion { beta2: 0.99 }, 1e-2)
///     .momentum(0.9)
///     .group(Group::matching("head.*").lr(0.5))
///     .build(&parameters)?;
/// (&parameters[0].tensor * 3.0).sum(Kind::Float).backward();
/// optimizer.step()?;
/// assert_eq!(parameters[0].tensor.double_value(&[0, 0]), 0.5);
/// assert_eq!(optimizer.state_dict()?.parameters[0].tensors[0].0, "exp_avg");
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// [`Optimizer::with_rule`]: crate::Optimizer::with_rule
pub trait Rule: fmt::Debug + Send {
    /// Returns the rule's name in states and messages: that of PyTorch's class, if there is one. A state of another
    /// name is refused.
    fn name(&self) -> &'static str;

    /// Returns the names of the tensors that are kept for each parameter, with PyTorch's names if it has the rule. They
    /// are addressed by their index in this list.
    fn slots(&self) -> &'static [&'static str];

    /// Returns `true` if each parameter's steps are counted, and saved as `step`. Defaults to `false`.
    fn counts_steps(&self) -> bool {
        false
    }

    /// Returns PyTorch's name of the hyperparameter that a schedule's momentum sets, or `None` if the rule has no
    /// momentum.
    fn momentum_name(&self) -> Option<&'static str> {
        None
    }

    /// Returns the hyperparameters that are the same in all groups, under PyTorch's names, with flags as 0 or 1. A
    /// state with different hyperparameters is an error.
    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Returns the shape of a slot for a parameter of this size, or `None` if such a parameter does not have the slot.
    fn slot_shape(&self, _slot: usize, size: &[i64]) -> Option<Vec<i64>> {
        Some(size.to_vec())
    }

    /// Returns `true` if a parameter that has taken steps may still lack this slot. Defaults to `false`.
    fn is_optional(&self, _slot: usize) -> bool {
        false
    }

    /// Returns an error for a parameter that the rule cannot step.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] with the name and the reason.
    fn check_parameter(&self, _name: &str, _size: &[i64]) -> Result<()> {
        Ok(())
    }

    /// Returns `true` if [`Rule::step`] uses [`Step::device_numbers`]. Other rules are stepped only without them.
    /// Defaults to `false`.
    fn takes_device_scalars(&self) -> bool {
        false
    }

    /// Returns `true` if an element's step depends only on that element, its gradient and its states. Such a rule steps
    /// the shards of a model whose parameters are divided over ranks in the same way as whole parameters. Defaults to
    /// `false`.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// Returns `true` if the rule can step the shards of a model: it is [elementwise](Rule::is_elementwise), or has
    /// [`Rule::step_shards`]. An optimizer of another rule is refused if parameters are divided over ranks.
    fn steps_shards(&self) -> bool {
        self.is_elementwise()
    }

    /// Steps the parameters of all groups, of which each rank has some rows, if the rule is not elementwise. All ranks
    /// have gradients of the same parameters, and call this together. Called without autograd, and without [numbers of
    /// a device](Rule::takes_device_scalars). [`Rule::slot_shape`] is called with this rank's rows of the parameter,
    /// for the shapes of this rank's slots. A slot that has no rows if the parameter has none is divided as the
    /// parameter is; any other slot is the same on all ranks.
    ///
    /// # Errors
    /// Returns the errors of libtorch and of collectives.
    fn step_shards(&self, _step: &mut ShardedStep<'_>) -> Result<()> {
        Err(Error::invalid_argument(format!(
            "{} returns `true` from `Rule::steps_shards`, but does not implement `Rule::step_shards`",
            self.name()
        )))
    }

    /// Steps the parameters of one group that have gradients. Called without autograd.
    ///
    /// # Errors
    /// Returns the errors of libtorch.
    fn step(&self, step: &mut Step<'_>) -> Result<()>;
}

/// Step of one group's parameters.
#[derive(Debug)]
pub struct Step<'a> {
    /// Indices of the parameters with a gradient.
    pub(crate) chosen: &'a [usize],
    pub(crate) parameters: &'a [&'a Tensor],
    pub(crate) gradients: &'a [&'a Tensor],
    pub(crate) states: &'a mut ParamStates,
    pub(crate) lr: f64,
    pub(crate) momentum: f64,
    pub(crate) weight_decay: f64,
    /// `true` if numbers of the step are on a device.
    pub(crate) on_device: bool,
    /// `true` if the rule counts steps.
    pub(crate) counts: bool,
    /// Numbers of the step on a device. The step count is not among them: each parameter has its own in `ParamStates`.
    pub(crate) device: DeviceNumbers<'a>,
}

/// Parameters of a step with equal step counts.
#[derive(Debug)]
pub(crate) struct Alike<'a> {
    states: &'a ParamStates,
    chosen: Vec<usize>,
    pub(crate) parameters: Vec<&'a Tensor>,
    pub(crate) gradients: Vec<&'a Tensor>,
    /// Number of steps, including this one, if it is counted on the host.
    pub(crate) steps: f64,
    pub(crate) device: DeviceNumbers<'a>,
}

impl<'a> Alike<'a> {
    /// Returns one slot of all parameters. Parameters without it are omitted.
    pub(crate) fn list(&self, slot: usize) -> Vec<&'a Tensor> {
        self.states.list(&self.chosen, slot)
    }

    /// Divides the parameters into those for which `of` returns `true`, and the others.
    pub(crate) fn partition(&self, of: impl Fn(&Tensor) -> bool) -> [Self; 2] {
        let (yes, no): (Vec<usize>, Vec<usize>) =
            (0..self.chosen.len()).partition(|&position| of(self.parameters[position]));
        [yes, no].map(|positions| Self {
            states: self.states,
            chosen: positions.iter().map(|&position| self.chosen[position]).collect(),
            parameters: positions.iter().map(|&position| self.parameters[position]).collect(),
            gradients: positions.iter().map(|&position| self.gradients[position]).collect(),
            steps: self.steps,
            device: self.device,
        })
    }
}

/// Slots of one parameter, while it is stepped.
#[derive(Debug, Clone, Copy)]
pub struct Slots<'a> {
    states: &'a ParamStates,
    index: usize,
    counts: bool,
}

impl Slots<'_> {
    /// Returns a slot, if it was filled before.
    #[must_use]
    pub fn get(&self, slot: usize) -> Option<&Tensor> {
        self.states.get(self.index, slot)
    }

    /// Returns a slot that must have been filled before.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if it was not.
    pub fn require(&self, slot: usize) -> Result<&Tensor> {
        self.get(slot).ok_or_else(|| {
            Error::invalid_argument(format!(
                "the rule reads slot {slot} of a parameter before `Step::fill_missing` has made it"
            ))
        })
    }

    /// Returns the number of steps of the parameter, including this one, or 0 if the rule does not count them. If
    /// numbers of the step are on a device, use [`Slots::count`].
    #[must_use]
    pub fn steps(&self) -> u64 {
        if self.counts { self.states.steps(self.index) } else { 0 }
    }

    /// Returns the number of steps of the parameter as a scalar on its device, including this one unless it is skipped.
    /// Returns `None` if no number of the step is on a device.
    #[must_use]
    pub fn count(&self) -> Option<&Tensor> {
        self.states.count(self.index)
    }
}

impl<'a> Step<'a> {
    /// Returns the parameters to step.
    pub fn parameters(&self) -> &'a [&'a Tensor] {
        self.parameters
    }

    /// Returns the gradients of the parameters, in the same order.
    pub fn gradients(&self) -> &'a [&'a Tensor] {
        self.gradients
    }

    /// Returns the group's learning rate.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// Returns the group's momentum.
    #[must_use]
    pub fn momentum(&self) -> f64 {
        self.momentum
    }

    /// Returns the group's weight decay.
    #[must_use]
    pub fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    /// Returns the numbers of the step that are on a device, including the group's learning rate. The field `steps` is
    /// empty, because each parameter has its own count ([`Slots::count`]). All fields are empty in
    /// [`Optimizer::step`](crate::Optimizer::step), and if the rule does not [use them](Rule::takes_device_scalars).
    #[must_use]
    pub fn device_numbers(&self) -> DeviceNumbers<'a> {
        self.device
    }

    /// Creates the slot of each parameter that lacks it, with zeros of the parameter's shape, type and layout. Converts
    /// existing ones to the parameter's device and layout.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when memory runs out.
    pub fn fill_missing(&mut self, slot: usize) -> Result<()> {
        self.fill_missing_with(slot, 0.0)
    }

    /// Does the same as [`Step::fill_missing`] with another value.
    ///
    /// # Errors
    /// Returns the same errors as [`Step::fill_missing`].
    pub fn fill_missing_with(&mut self, slot: usize, value: f64) -> Result<()> {
        for (&index, parameter) in self.chosen.iter().zip(self.parameters) {
            self.states.fill_like(index, slot, parameter, || like(parameter, value))?;
        }
        Ok(())
    }

    /// Does the same as [`Step::fill_missing`] with zeros in the shape that `shape` returns for each parameter's size.
    ///
    /// # Errors
    /// Returns the same errors as [`Step::fill_missing`].
    pub fn fill_missing_shaped(
        &mut self,
        slot: usize,
        shape: impl Fn(&[i64]) -> Option<Vec<i64>>,
    ) -> Result<()> {
        for (&index, parameter) in self.chosen.iter().zip(self.parameters) {
            let Some(shape) = shape(&parameter.size()) else { continue };
            let options = (parameter.f_kind()?, parameter.device());
            self.states.fill_shaped(index, slot, &shape, options)?;
        }
        Ok(())
    }

    /// Returns one slot of all parameters, for kernels that take lists. Parameters without it are omitted.
    #[must_use]
    pub fn list(&self, slot: usize) -> Vec<&Tensor> {
        self.states.list(self.chosen, slot)
    }

    /// Runs `run` with each parameter, its gradient and its slots.
    ///
    /// # Errors
    /// Returns the errors of `run`.
    pub fn each(
        &self,
        mut run: impl FnMut(&Tensor, &Tensor, &Slots<'_>) -> Result<()>,
    ) -> Result<()> {
        for (position, &index) in self.chosen.iter().enumerate() {
            let slots = Slots { states: self.states, index, counts: self.counts };
            run(self.parameters[position], self.gradients[position], &slots)?;
        }
        Ok(())
    }

    /// Returns the parameters in groups of equal step counts, of which there is usually one.
    pub(crate) fn by_count(&self) -> Vec<Alike<'_>> {
        let mut alike: Vec<((Option<TensorId>, u64), Alike<'_>)> = Vec::new();
        for (position, &index) in self.chosen.iter().enumerate() {
            let count = self.states.count(index);
            let steps = self.states.steps(index);
            let key = match count {
                Some(count) => (Some(TensorId::of(count)), 0),
                None => (None, steps),
            };
            let place = alike.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
                let own = Alike {
                    states: self.states,
                    chosen: Vec::new(),
                    parameters: Vec::new(),
                    gradients: Vec::new(),
                    steps: steps as f64,
                    device: DeviceNumbers { steps: count, ..self.device },
                };
                alike.push((key, own));
                alike.len() - 1
            });
            let own = &mut alike[place].1;
            own.chosen.push(index);
            own.parameters.push(self.parameters[position]);
            own.gradients.push(self.gradients[position]);
        }
        alike.into_iter().map(|(_, own)| own).collect()
    }

    /// Returns each parameter's step count as a scalar on its device, for libtorch's kernels. Equal counts share a
    /// tensor.
    pub(crate) fn step_tensors(&self) -> Result<Vec<Tensor>> {
        let mut made: Vec<(u64, Device, Tensor)> = Vec::new();
        let each = self.chosen.iter().zip(self.parameters).map(|(&index, parameter)| {
            if let Some(count) = self.states.count(index) {
                return Ok(count.shallow_clone());
            }
            let (steps, device) = (self.states.steps(index), parameter.device());
            if let Some((.., tensor)) = made.iter().find(|(s, d, _)| (*s, *d) == (steps, device)) {
                return Ok(tensor.shallow_clone());
            }
            let tensor = Tensor::f_full([0i64; 0], steps as f64, (STEP_KIND, device))?;
            made.push((steps, device, tensor.shallow_clone()));
            Ok(tensor)
        });
        each.collect()
    }
}

/// One group's part of a step.
#[derive(Debug)]
pub(crate) struct GroupStep<'a> {
    /// Indices of the parameters with a gradient.
    pub(crate) chosen: Vec<usize>,
    pub(crate) parameters: Vec<&'a Tensor>,
    pub(crate) gradients: Vec<&'a Tensor>,
    pub(crate) lr: f64,
    pub(crate) momentum: f64,
    pub(crate) weight_decay: f64,
    /// Learning rate, if it is on a device.
    pub(crate) lr_on_device: Option<Tensor>,
}

impl<'a> GroupStep<'a> {
    /// Returns the step of this group.
    pub(crate) fn step<'s>(
        &'s self,
        states: &'s mut ParamStates,
        counts: bool,
        on_device: bool,
        device: DeviceNumbers<'s>,
    ) -> Step<'s> {
        Step {
            chosen: &self.chosen,
            parameters: &self.parameters,
            gradients: &self.gradients,
            states,
            lr: self.lr,
            momentum: self.momentum,
            weight_decay: self.weight_decay,
            on_device,
            counts,
            device,
        }
    }
}

/// A step of the parameters of all groups, of which each rank has some rows.
///
/// ```
/// use brigade_optim::{Rule, ShardedStep, Step};
/// use brigade_torch::Result;
/// use tch::{Kind, Tensor};
///
/// /// Gradient descent by a step of length 1 for each parameter.
/// #[derive(Debug)]
/// struct Normalized;
///
/// fn square_sum(gradient: &Tensor) -> Result<Tensor> {
///     Ok(gradient.f_square()?.f_sum(Kind::Double)?)
/// }
///
/// fn descend(parameter: &Tensor, gradient: &Tensor, square_sum: &Tensor, lr: f64) -> Result<()> {
///     let step = gradient.f_div(&square_sum.f_sqrt()?)?.f_mul_scalar(lr)?;
///     let _ = parameter.shallow_clone().f_sub_(&step)?;
///     Ok(())
/// }
///
/// impl Rule for Normalized {
///     fn name(&self) -> &'static str { "Normalized" }
///
///     fn slots(&self) -> &'static [&'static str] { &[] }
///
///     fn step(&self, step: &mut Step<'_>) -> Result<()> {
///         let lr = step.lr();
///         step.each(|weight, gradient, _| descend(weight, gradient, &square_sum(gradient)?, lr))
///     }
///
///     fn steps_shards(&self) -> bool { true }
///
///     fn step_shards(&self, step: &mut ShardedStep<'_>) -> Result<()> {
///         let mut sums = step.shards().sums();
///         step.each_group(|step| {
///             step.each(|rows, gradient, _| {
///                 sums.add(rows, square_sum(gradient)?);
///                 Ok(())
///             })
///         })?;
///         let mut sums = sums.reduce()?; // one message for all parameters
///         step.each_group(|step| {
///             let lr = step.lr();
///             step.each(|rows, gradient, _| descend(rows, gradient, &sums.next()?, lr))
///         })
///     }
/// }
/// ```
#[derive(Debug)]
pub struct ShardedStep<'a> {
    pub(crate) shards: &'a Shards,
    pub(crate) groups: &'a [GroupStep<'a>],
    pub(crate) states: &'a mut ParamStates,
    /// `true` if the rule counts steps.
    pub(crate) counts: bool,
}

impl<'a> ShardedStep<'a> {
    /// Returns the division of the parameters over ranks.
    #[must_use]
    pub fn shards(&self) -> &'a Shards {
        self.shards
    }

    /// Runs `run` for each group with this rank's rows, in the order of the groups. A rule that needs sums over the
    /// ranks iterates over all groups to add its values, reduces them once, and iterates over all groups again.
    ///
    /// # Errors
    /// Returns the errors of `run`.
    pub fn each_group(&mut self, mut run: impl FnMut(&mut Step<'_>) -> Result<()>) -> Result<()> {
        let none = DeviceNumbers::default();
        self.groups
            .iter()
            .try_for_each(|group| run(&mut group.step(self.states, self.counts, false, none)))
    }
}
