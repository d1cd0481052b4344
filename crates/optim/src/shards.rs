//! Steps of parameters whose rows are spread over ranks, for rules that need more of a parameter than a rank has.

use std::collections::HashMap;
use std::ops::Range;

use brigade_torch::{DeviceNumbers, Error, ProcessGroup, ReduceOp, Result, TensorId};
use tch::{Kind, Tensor};

use crate::param_state::ParamStates;
use crate::rule::{Rule, Step};

/// The ranks among which the rows of parameters are spread: `ceil(rows / ranks)` for each, the last ones may have fewer
/// or none.
#[derive(Debug)]
pub struct Shards {
    group: ProcessGroup,
    /// Shapes of the whole parameters, by the identities of this rank's shards, which are theirs as long as there is a
    /// handle.
    shapes: HashMap<TensorId, (Tensor, Vec<i64>)>,
}

impl Shards {
    pub(crate) fn new(group: &ProcessGroup) -> Self {
        Self { group: group.clone(), shapes: HashMap::new() }
    }

    pub(crate) fn add(&mut self, shard: &Tensor, shape: Vec<i64>) {
        self.shapes.insert(TensorId::of(shard), (shard.shallow_clone(), shape));
    }

    /// Returns the ranks that share one copy of the parameters.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the shape of the whole parameter, of which `shard` is this rank's rows; `None` for a parameter that every
    /// rank has whole.
    #[must_use]
    pub fn whole_shape(&self, shard: &Tensor) -> Option<&[i64]> {
        self.shapes.get(&TensorId::of(shard)).map(|(_, shape)| shape.as_slice())
    }

    /// Returns which of a parameter's rows a rank of the group has.
    #[must_use]
    pub fn rows_of(&self, rank: usize, rows: i64) -> Range<i64> {
        let ranks = self.group.size() as i64;
        let share = (rows + ranks - 1) / ranks;
        let first = (rank as i64 * share).min(rows);
        first..(first + share).min(rows)
    }

    /// Begins a list of sums over the ranks.
    #[must_use]
    pub fn sums(&self) -> RankSums<'_> {
        RankSums { shards: self, values: Vec::new() }
    }
}

/// Numbers of parameters that are summed over the ranks, all in one message. Made by [`Shards::sums`].
#[derive(Debug)]
pub struct RankSums<'a> {
    shards: &'a Shards,
    /// Whether each is this rank's part of a sum.
    values: Vec<(bool, Tensor)>,
}

impl RankSums<'_> {
    /// Adds what this rank's rows of a parameter have of a sum, of the same shape on each rank. Where every rank has the
    /// whole parameter, it is the sum already.
    pub fn add(&mut self, shard: &Tensor, value: Tensor) {
        self.values.push((self.shards.whole_shape(shard).is_some(), value));
    }

    /// Adds a value for each of these parameters.
    pub(crate) fn add_all(&mut self, shards: &[&Tensor], values: Vec<Tensor>) {
        shards.iter().zip(values).for_each(|(shard, value)| self.add(shard, value));
    }

    /// Returns the sums, in the order in which they were added: the same bits on all ranks, which all take part.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone; [`brigade_torch::ErrorKind::Tensor`] when memory
    /// runs out.
    pub fn reduce(self) -> Result<ReducedSums> {
        let Self { shards, values } = self;
        let flat = values.iter().filter(|(spread, _)| *spread);
        let flat = flat.map(|(_, value)| Ok(value.f_to_kind(Kind::Double)?.f_reshape([-1])?));
        let flat = flat.collect::<Result<Vec<_>>>()?;
        let mut sums = Vec::new().into_iter();
        if !flat.is_empty() {
            let sizes: Vec<i64> = flat.iter().map(|value| value.numel() as i64).collect();
            let mut sum = Tensor::f_cat(&flat, 0)?;
            shards.group.all_reduce(&mut sum, ReduceOp::Sum)?;
            sums = sum.f_split_with_sizes(&sizes, 0)?.into_iter();
        }
        let all = values.into_iter().map(|(spread, value)| {
            let sum = if spread { sums.next() } else { None };
            Ok(match sum {
                Some(sum) => sum.f_reshape(value.size())?,
                None => value.f_to_kind(Kind::Double)?,
            })
        });
        let all: Vec<Tensor> = all.collect::<Result<_>>()?;
        Ok(ReducedSums(all.into_iter()))
    }
}

/// The sums of [`RankSums::reduce`].
#[derive(Debug)]
pub struct ReducedSums(std::vec::IntoIter<Tensor>);

impl ReducedSums {
    /// Returns the next sum, in double precision.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when fewer were added.
    #[expect(clippy::should_implement_trait, reason = "a missing sum is an error")]
    pub fn next(&mut self) -> Result<Tensor> {
        let missing = || Error::invalid_argument("a rule reads more sums than it has added");
        self.0.next().ok_or_else(missing)
    }

    /// Returns the next sums.
    pub(crate) fn take(&mut self, count: usize) -> Result<Vec<Tensor>> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// One group's part of a step.
#[derive(Debug)]
pub(crate) struct GroupStep<'a> {
    /// The indices of the parameters that have a gradient.
    pub(crate) chosen: Vec<usize>,
    pub(crate) parameters: Vec<&'a Tensor>,
    pub(crate) gradients: Vec<&'a Tensor>,
    pub(crate) lr: f64,
    pub(crate) momentum: f64,
    pub(crate) weight_decay: f64,
    /// The learning rate where it is on a device.
    pub(crate) lr_on_device: Option<Tensor>,
}

impl<'a> GroupStep<'a> {
    /// The step of this group alone.
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

/// One step of the parameters of all groups, of which each rank has some rows.
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
    /// Whether the rule counts steps.
    pub(crate) counts: bool,
}

impl<'a> ShardedStep<'a> {
    /// Returns who has what of the parameters.
    #[must_use]
    pub fn shards(&self) -> &'a Shards {
        self.shards
    }

    /// Runs `run` for each group with this rank's rows, in the order of the groups. A rule that needs sums over the ranks
    /// goes over all groups, adds up what it has, reduces it once, and goes over all groups again.
    ///
    /// # Errors
    /// Those of `run`.
    pub fn each_group(&mut self, mut run: impl FnMut(&mut Step<'_>) -> Result<()>) -> Result<()> {
        let none = DeviceNumbers::default();
        self.groups
            .iter()
            .try_for_each(|group| run(&mut group.step(self.states, self.counts, false, none)))
    }
}

/// The type in which a step is computed: at least 32 bits.
pub(crate) fn wide(tensor: &Tensor) -> Result<Tensor> {
    Ok(match tensor.f_kind()? {
        Kind::Half | Kind::BFloat16 => tensor.f_to_kind(Kind::Float)?,
        _ => tensor.shallow_clone(),
    })
}

/// The slots of a parameter of this size whose rows are spread as the parameter's own are, with their whole shapes.
pub(crate) fn spread_slots(
    names: &[&'static str],
    shape: impl Fn(usize, &[i64]) -> Option<Vec<i64>>,
    size: &[i64],
) -> Vec<(&'static str, Vec<i64>)> {
    // A rank without rows of the parameter has none of such a slot.
    let mut empty = size.to_vec();
    if let Some(rows) = empty.first_mut() {
        *rows = 0;
    }
    let slots = names.iter().enumerate().filter_map(|(slot, &name)| {
        let is_spread = shape(slot, &empty)?.first() == Some(&0);
        is_spread.then(|| shape(slot, size)).flatten().map(|shape| (name, shape))
    });
    slots.collect()
}

/// The message of a rule that cannot step shards.
pub(crate) fn refused(rule: &dyn Rule) -> Error {
    Error::invalid_argument(format!(
        "{} cannot step the shards of a model: an element's step may depend on other elements of its parameter; implement \
         `Rule::is_elementwise` or `Rule::step_shards`, use an optimizer such as AdamW, or train without sharding",
        rule.name()
    ))
}
