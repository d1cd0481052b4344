//! The scheduler, which sets an optimizer's learning rates from a schedule.

use std::fmt;
use std::sync::Arc;

use brigade_checkpoint::Value;
use brigade_schedule::{Definition, Described, LrSchedule, Plateau, PlateauState};
use brigade_torch::{Error, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::optimizer::Optimizer;

/// Sets an optimizer's learning rate (and momentum, if the schedule has one) from a schedule: a
/// [`Schedule`](brigade_schedule::Schedule), a closure `Fn(u64) -> f64`, or anything that implements [`LrSchedule`].
///
/// The schedule is a function of the optimizer step. A group with a learning rate of its own keeps its ratio to the
/// optimizer's, unless each group has a schedule ([`Scheduler::per_group`]). A checkpoint contains the step, the state
/// of a schedule that follows a metric, and the schedule's definition for a conversion to PyTorch. A resumed program
/// creates the same schedule and continues at that step. A clone is a second handle of the same scheduler.
///
/// ```
/// use brigade_schedule::Schedule;
/// use brigade_optim::{Adam, Scheduler};
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
/// let optimizer = Adam::default().build(&model)?;
/// let mut scheduler = Scheduler::new(&optimizer, Schedule::cosine(5e-3, 0.0, 1000)?);
/// assert_eq!(optimizer.lr(), 5e-3);
///
/// let mut own = Scheduler::new(&optimizer, |step: u64| 1e-3 / (1.0 + step as f64));
/// own.step()?;
/// assert_eq!(optimizer.lr(), 5e-4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Scheduler {
    inner: Arc<SchedulerInner>,
}

/// State of a [`Scheduler`] in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// Number of steps made, which is the current step of the schedule.
    pub position: u64,
    /// State of a schedule that watches a metric.
    pub plateau: Option<PlateauState>,
}

struct SchedulerInner {
    plan: Plan,
    optimizer: Optimizer,
    state: Mutex<SchedulerState>,
}

enum Plan {
    Steps(Box<dyn LrSchedule>),
    /// One schedule for the parameters that no group matches, then one for each group.
    Groups(Vec<Box<dyn LrSchedule>>),
    Metric(Plateau),
}

impl Scheduler {
    /// Creates a scheduler of an optimizer, and sets the learning rate to the schedule's first value.
    ///
    /// A value that is negative or not finite is an error of [`Scheduler::step`]; if it is the first value, of the
    /// optimizer's next step.
    #[must_use]
    pub fn new(optimizer: &Optimizer, schedule: impl LrSchedule + 'static) -> Self {
        Self::start(optimizer, Plan::Steps(Box::new(schedule)), None)
    }

    /// Creates a scheduler that sets each group's learning rate from its own schedule: the first schedule is for the
    /// parameters that no group matches, the others are for each `group` of the optimizer's builder, in order.
    ///
    /// ```
    /// use brigade_optim::{Group, Scheduler, Sgd};
    /// use brigade_schedule::LrSchedule;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "encoder", 2, 2, Default::default());
    /// # let _ = tch::nn::linear(model.root() / "head", 2, 2, Default::default());
    /// let optimizer = Sgd::new(0.1).group(Group::matching("encoder.*")).build(&model)?;
    /// let head: Box<dyn LrSchedule> = Box::new(|_: u64| 0.1);
    /// let encoder: Box<dyn LrSchedule> = Box::new(|step: u64| if step < 100 { 0.0 } else { 0.01 });
    /// let scheduler = Scheduler::per_group(&optimizer, vec![head, encoder])?;
    /// let rates: Vec<f64> = optimizer.groups().iter().map(|group| group.lr()).collect();
    /// assert_eq!(rates, [0.1, 0.0]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if the number of schedules differs from the number of parameter
    /// groups.
    pub fn per_group(optimizer: &Optimizer, schedules: Vec<Box<dyn LrSchedule>>) -> Result<Self> {
        let expected = optimizer.lock().schedulable_groups();
        if schedules.len() != expected {
            return Err(Error::invalid_argument(format!(
                "Scheduler::per_group has {} schedules, expected {expected}: one for the parameters that \
                 no group matches, and one for each group of the optimizer's builder",
                schedules.len()
            )));
        }
        Ok(Self::start(optimizer, Plan::Groups(schedules), None))
    }

    /// Creates a scheduler that reduces the learning rate when a metric stops improving. Advance it by
    /// [`Scheduler::step_with`] after each evaluation.
    ///
    /// ```
    /// use brigade_schedule::Plateau;
    /// use brigade_optim::{Scheduler, Sgd};
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let optimizer = Sgd::new(0.1).build(&model)?;
    /// let plateau = Plateau { patience: 2, ..Plateau::new(0.1) };
    /// let mut scheduler = Scheduler::on_plateau(&optimizer, plateau)?;
    /// for loss in [1.0, 0.9, 0.9, 0.9, 0.9] {
    ///     scheduler.step_with(loss)?;
    /// }
    /// assert_eq!(scheduler.lr(), 0.1 * 0.1);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_schedule::ScheduleError`] for a setting of `plateau` that is out of range.
    pub fn on_plateau(optimizer: &Optimizer, plateau: Plateau) -> Result<Self> {
        plateau.check()?;
        Ok(Self::start(optimizer, Plan::Metric(plateau), Some(plateau.start())))
    }

    fn start(optimizer: &Optimizer, plan: Plan, plateau: Option<PlateauState>) -> Self {
        let state = SchedulerState { position: 0, plateau };
        let inner = SchedulerInner { plan, optimizer: optimizer.clone(), state: Mutex::new(state) };
        inner.set(&inner.at(&state));
        Self { inner: Arc::new(inner) }
    }

    /// Advances the schedule by one step. Call it after the optimizer's step.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a schedule that follows a metric, and if the next value is
    /// negative or not finite. The learning rate stays unchanged then.
    pub fn step(&mut self) -> Result<()> {
        self.advance(1)
    }

    /// Advances the schedule by `steps` steps.
    ///
    /// # Errors
    /// Returns the same errors as [`Scheduler::step`].
    pub fn advance(&mut self, steps: u64) -> Result<()> {
        if self.watches_metric() {
            return Err(Error::invalid_argument(
                "this scheduler watches a metric, and `step` has none: call `step_with(metric)` after \
                 each evaluation",
            ));
        }
        let mut state = self.inner.state.lock();
        let position = state.position.saturating_add(steps);
        self.inner.move_to(&mut state, SchedulerState { position, plateau: None })
    }

    /// Advances a schedule that follows a metric, after an evaluation with this metric.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a schedule that does not follow a metric.
    pub fn step_with(&mut self, metric: f64) -> Result<()> {
        let Plan::Metric(plateau) = &self.inner.plan else {
            return Err(Error::invalid_argument(
                "this scheduler counts steps and watches no metric: call `step`, or make it with \
                 `Scheduler::on_plateau`",
            ));
        };
        let mut state = self.inner.state.lock();
        let before = state.plateau.unwrap_or_else(|| plateau.start());
        let next = SchedulerState {
            position: state.position.saturating_add(1),
            plateau: Some(plateau.after(&before, metric)),
        };
        self.inner.move_to(&mut state, next)
    }

    /// Returns `true` if the schedule follows a metric, so that it is advanced by [`Scheduler::step_with`] and not by
    /// [`Scheduler::step`].
    #[must_use]
    pub fn watches_metric(&self) -> bool {
        matches!(self.inner.plan, Plan::Metric(_))
    }

    /// Returns the optimizer's current learning rate.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.inner.optimizer.lr()
    }

    /// Returns the number of steps so far.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.state().position
    }

    /// Returns the state of the scheduler, for a checkpoint.
    #[must_use]
    pub fn state(&self) -> SchedulerState {
        *self.inner.state.lock()
    }

    /// Returns the definition of the schedule, which checkpoints contain as information.
    #[must_use]
    pub fn definition(&self) -> Definition {
        match &self.inner.plan {
            Plan::Steps(schedule) => Definition::All(Described::of(schedule)),
            Plan::Groups(schedules) => {
                Definition::Groups(schedules.iter().map(|it| Described::of(it)).collect())
            }
            Plan::Metric(plateau) => Definition::Plateau(*plateau),
        }
    }

    /// Returns the state as a tree, in the format of checkpoints: that of [`SchedulerState::to_value`], with an
    /// additional `definition`, which a load ignores.
    #[must_use]
    pub fn to_value<T>(&self) -> Value<T> {
        let state = self.state().to_value(self.lr());
        let definition = Value::from_plain(&self.definition()).unwrap_or(Value::None);
        match state {
            Value::Dict(mut entries) => {
                entries.push((Value::Str("definition".to_owned()), definition));
                Value::Dict(entries)
            }
            state => state,
        }
    }

    /// Checks that a state is of the same kind of scheduler.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if only one of the two follows a metric.
    pub fn check_state(&self, state: &SchedulerState) -> Result<()> {
        if self.watches_metric() == state.plateau.is_some() {
            return Ok(());
        }
        let (found, expected) = match self.inner.plan {
            Plan::Metric(_) => ("counts steps", "watches a metric"),
            Plan::Steps(_) | Plan::Groups(_) => ("watches a metric", "counts steps"),
        };
        Err(Error::invalid_argument(format!(
            "the scheduler's state is of one that {found}, and this one {expected}: make the same \
             scheduler as in the run that was saved"
        )))
    }

    /// Loads the state of a scheduler of the same kind, and sets the learning rate of that step.
    ///
    /// # Errors
    /// Returns the same errors as [`Scheduler::check_state`], and as [`Scheduler::step`] for the value at that step.
    pub fn load_state(&mut self, state: &SchedulerState) -> Result<()> {
        self.check_state(state)?;
        let mut current = self.inner.state.lock();
        self.inner.move_to(&mut current, *state)
    }
}

/// Learning rate and momentum of each group, or of all.
enum Rates {
    All(f64, Option<f64>),
    Groups(Vec<(f64, Option<f64>)>),
}

impl SchedulerInner {
    /// Returns the schedule's value at that step.
    fn at(&self, state: &SchedulerState) -> Rates {
        let step = state.position;
        match &self.plan {
            Plan::Steps(schedule) => Rates::All(schedule.lr(step), schedule.momentum(step)),
            Plan::Groups(schedules) => {
                Rates::Groups(schedules.iter().map(|it| (it.lr(step), it.momentum(step))).collect())
            }
            Plan::Metric(plateau) => {
                Rates::All(state.plateau.map_or(plateau.lr, |plateau| plateau.lr), None)
            }
        }
    }

    fn set(&self, rates: &Rates) {
        let mut optimizer = self.optimizer.lock();
        match rates {
            Rates::All(lr, momentum) => optimizer.schedule(*lr, *momentum),
            Rates::Groups(rates) => optimizer.schedule_groups(rates),
        }
    }

    fn move_to(&self, state: &mut SchedulerState, next: SchedulerState) -> Result<()> {
        let rates = self.at(&next);
        let each = match &rates {
            Rates::All(lr, momentum) => &[(*lr, *momentum)][..],
            Rates::Groups(rates) => rates,
        };
        let bad = |number: f64| !number.is_finite() || number < 0.0;
        let wrong = |(lr, momentum): &&(f64, Option<f64>)| bad(*lr) || momentum.is_some_and(bad);
        if let Some((lr, momentum)) = each.iter().find(wrong) {
            let momentum = momentum.map(|momentum| format!(" and the momentum {momentum}"));
            return Err(Error::invalid_argument(format!(
                "the schedule gives the learning rate {lr}{} for step {}, expected finite numbers from 0",
                momentum.unwrap_or_default(),
                next.position
            )));
        }
        *state = next;
        self.set(&rates);
        Ok(())
    }
}

impl SchedulerState {
    /// Returns the state as a tree, in the format of checkpoints.
    #[must_use]
    pub fn to_value<T>(&self, lr: f64) -> Value<T> {
        let number = |number: u64| Value::Int(number.cast_signed());
        let plateau = self.plateau.map(|plateau| {
            Value::dict([
                ("lr", Value::Float(plateau.lr)),
                ("best", plateau.best.map_or(Value::None, Value::Float)),
                ("bad", number(plateau.bad)),
                ("cooling", number(plateau.cooling)),
                ("seen", number(plateau.seen)),
            ])
        });
        Value::dict([
            ("position", number(self.position)),
            ("lr", Value::Float(lr)),
            ("plateau", plateau.unwrap_or(Value::None)),
        ])
    }

    /// Reads a state from the tree that `to_value` returned.
    ///
    /// # Errors
    /// Fails if a part of the tree is missing. The message contains its name.
    pub fn from_value<T>(state: &Value<T>) -> Result<Self, String> {
        let count = |of: &Value<T>, key: &str| {
            let number = of.get(key).and_then(Value::as_int).map(i64::cast_unsigned);
            number.ok_or_else(|| format!("a scheduler's state needs the integer `{key}`"))
        };
        let plateau = match state.get("plateau") {
            None | Some(Value::None) => None,
            Some(plateau) => {
                let lr = plateau.get("lr").and_then(Value::as_float);
                Some(PlateauState {
                    lr: lr.ok_or("a scheduler's state needs the number `lr`")?,
                    best: plateau.get("best").and_then(Value::as_float),
                    bad: count(plateau, "bad")?,
                    cooling: count(plateau, "cooling")?,
                    seen: count(plateau, "seen")?,
                })
            }
        };
        Ok(Self { position: count(state, "position")?, plateau })
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.inner.plan {
            Plan::Steps(_) => "steps",
            Plan::Groups(_) => "groups",
            Plan::Metric(_) => "metric",
        };
        f.debug_struct("Scheduler").field("kind", &kind).field("state", &self.state()).finish()
    }
}
