//! The update rule of an optimizer: the trait that user-defined optimizers implement, and its arguments.

use std::fmt;

use brigade_torch::{DeviceNumbers, Error, Result, TensorId};
use tch::{Device, Tensor};

use crate::param_state::{ParamStates, STEP_KIND, like};
use crate::shards::Shards;

/// Update rule of an optimizer: the arithmetic by which a parameter changes along its gradient.
///
/// The state of each parameter is in named *slots*, tensors that the optimizer saves, loads, and moves to another
/// device or memory format with the parameter. Parameter groups with their learning rate, weight decay and momentum,
/// schedules and checkpoints work with every rule, and so do accumulation, loss scaling and loss checks after
/// `prepare`. [`Optimizer::with_rule`] creates an optimizer from a rule.
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
    /// Returns the name of the rule in states and messages: that of PyTorch's class, if there is one. Loading a state
    /// with another name is an error.
    fn name(&self) -> &'static str;

    /// Returns the names of the slots, which are PyTorch's names if PyTorch has the rule. Slots are addressed by their
    /// index in this list.
    fn slots(&self) -> &'static [&'static str];

    /// Returns `true` if each parameter's steps are counted, and saved as `step`.
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

    /// Returns `true` if a parameter that has taken steps may still lack this slot.
    fn is_optional(&self, _slot: usize) -> bool {
        false
    }

    /// Checks that the rule can update a parameter of this name and size.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] with the name and the reason.
    fn check_parameter(&self, _name: &str, _size: &[i64]) -> Result<()> {
        Ok(())
    }

    /// Returns `true` if [`Rule::step`] uses [`Step::device_numbers`]. Without that,
    /// [`Optimizer::step_with`](crate::Optimizer::step_with) is an error.
    fn takes_device_scalars(&self) -> bool {
        false
    }

    /// Returns `true` if the update of an element depends only on that element, its gradient and its states. Such a
    /// rule updates the shards of a sharded model exactly as it updates whole parameters. Defaults to `false`.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// Returns `true` if the rule can update sharded parameters: it is [elementwise](Rule::is_elementwise), or
    /// implements [`Rule::step_shards`]. Sharding the parameters of any other rule is an error.
    fn steps_shards(&self) -> bool {
        self.is_elementwise()
    }

    /// Updates the sharded parameters of all groups, if the rule is not elementwise. All ranks have gradients of the
    /// same parameters, and call it together. It is called without autograd, and without [scalars on a
    /// device](Rule::takes_device_scalars). The shapes of this rank's slots are those that [`Rule::slot_shape`] returns
    /// for this rank's rows of the parameter. A slot is sharded like its parameter if [`Rule::slot_shape`] returns a
    /// shape without rows for a parameter without rows; any other slot is the same on all ranks.
    ///
    /// # Errors
    /// Returns errors of libtorch and of collectives.
    fn step_shards(&self, _step: &mut ShardedStep<'_>) -> Result<()> {
        Err(Error::invalid_argument(format!(
            "{} returns `true` from `Rule::steps_shards`, but does not implement `Rule::step_shards`",
            self.name()
        )))
    }

    /// Updates the parameters of one group that have gradients. It is called without autograd.
    ///
    /// # Errors
    /// Returns an error of libtorch.
    fn step(&self, step: &mut Step<'_>) -> Result<()>;
}

/// Arguments of a step of one group's parameters.
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

/// Slots of one parameter, during a step.
#[derive(Debug, Clone, Copy)]
pub struct Slots<'a> {
    states: &'a ParamStates,
    index: usize,
    counts: bool,
}

impl Slots<'_> {
    /// Returns the tensor of a slot, or `None` if the slot was not filled before.
    #[must_use]
    pub fn get(&self, slot: usize) -> Option<&Tensor> {
        self.states.get(self.index, slot)
    }

    /// Returns the tensor of a slot that was filled before.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if the slot was not filled.
    pub fn require(&self, slot: usize) -> Result<&Tensor> {
        self.get(slot).ok_or_else(|| {
            Error::invalid_argument(format!(
                "the rule reads slot {slot} of a parameter before `Step::fill_missing` has made it"
            ))
        })
    }

    /// Returns the number of steps that the parameter has taken, including this one, or 0 if the rule does not count
    /// steps. In a step with scalars on a device, use [`Slots::count`] instead.
    #[must_use]
    pub fn steps(&self) -> u64 {
        if self.counts { self.states.steps(self.index) } else { 0 }
    }

    /// Returns the number of steps that the parameter has taken as a scalar tensor on its device, including this one
    /// unless it is skipped. `None` in a step without scalars on a device.
    #[must_use]
    pub fn count(&self) -> Option<&Tensor> {
        self.states.count(self.index)
    }
}

impl<'a> Step<'a> {
    /// Returns the parameters to update.
    pub fn parameters(&self) -> &'a [&'a Tensor] {
        self.parameters
    }

    /// Returns the gradients of [`Step::parameters`], in the same order.
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

    /// Returns the scalars of the step that are on a device, including the group's learning rate. The field `steps` is
    /// empty, because each parameter has its own count ([`Slots::count`]). All fields are empty in
    /// [`Optimizer::step`](crate::Optimizer::step), and for a rule that does not [support
    /// them](Rule::takes_device_scalars).
    #[must_use]
    pub fn device_numbers(&self) -> DeviceNumbers<'a> {
        self.device
    }

    /// Fills the slot of each parameter that lacks it with zeros of the parameter's shape, dtype and layout. Moves
    /// existing slots to the parameter's device and layout.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if memory runs out.
    pub fn fill_missing(&mut self, slot: usize) -> Result<()> {
        self.fill_missing_with(slot, 0.0)
    }

    /// Fills the slot of each parameter that lacks it with `value`, like [`Step::fill_missing`] with zeros.
    ///
    /// # Errors
    /// Returns the same errors as [`Step::fill_missing`].
    pub fn fill_missing_with(&mut self, slot: usize, value: f64) -> Result<()> {
        for (&index, parameter) in self.chosen.iter().zip(self.parameters) {
            self.states.fill_like(index, slot, parameter, || like(parameter, value))?;
        }
        Ok(())
    }

    /// Fills the slot of each parameter that lacks it with zeros of the shape that `shape` returns for the parameter's
    /// size.
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

    /// Returns one slot of all parameters, for kernels that take lists. Parameters that lack the slot are left out.
    #[must_use]
    pub fn list(&self, slot: usize) -> Vec<&Tensor> {
        self.states.list(self.chosen, slot)
    }

    /// Calls `run` with each parameter, its gradient and its slots.
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

/// Part of a step for one group.
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
    /// Returns the part of the step for the parameters that `is_in` selects.
    pub(crate) fn only(&self, is_in: impl Fn(&Tensor) -> bool) -> Self {
        let places: Vec<usize> =
            (0..self.chosen.len()).filter(|&place| is_in(self.parameters[place])).collect();
        Self {
            chosen: places.iter().map(|&place| self.chosen[place]).collect(),
            parameters: places.iter().map(|&place| self.parameters[place]).collect(),
            gradients: places.iter().map(|&place| self.gradients[place]).collect(),
            lr_on_device: self.lr_on_device.as_ref().map(Tensor::shallow_clone),
            ..*self
        }
    }

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

/// Arguments of a step of all groups' parameters, of which each rank has some rows.
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
    /// Returns the distribution of the parameters' rows over the ranks.
    #[must_use]
    pub fn shards(&self) -> &'a Shards {
        self.shards
    }

    /// Calls `run` for each group with this rank's rows, in the order of the groups. A rule that needs sums over the
    /// ranks calls it twice: once to compute this rank's part of all sums, which it then reduces in one message, and
    /// once to update the parameters.
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
