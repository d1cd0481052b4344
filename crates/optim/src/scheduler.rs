//! A schedule that moves an optimizer's learning rate.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brigade_plan::{Plateau, PlateauState, Schedule};
use serde::{Deserialize, Serialize};

use crate::accelerator::{Accelerator, Job};
use crate::error::{Error, Result};
use crate::gradients::accumulate::Accumulation;
use crate::optim::{Numbers, Optimizer};
use crate::prepare::Prepare;

/// Sets an optimizer's learning rate (and momentum, where the schedule has one) from a schedule.
///
/// The schedule is counted in optimizer steps, the same number on 1 rank or 64. After
/// [`Accelerator::prepare`], `step` does nothing while gradients are still being added up, and after an
/// optimizer step that was left out. A group with a learning rate of its own keeps its ratio to the
/// optimizer's.
///
/// ```no_run
/// # use brigade_models::{Cnn, Model};
/// use brigade_plan::Schedule;
/// use brigade_train::{Adam, Scheduler};
/// # fn f(model: &Model<Cnn>) -> Result<(), Box<dyn std::error::Error>> {
/// let optimizer = Adam::default().build(model)?;
/// let scheduler = Scheduler::new(&optimizer, Schedule::cosine(5e-3, 0.0, 1000)?);
/// assert_eq!(optimizer.lr(), 5e-3);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) course: Arc<Course>,
    accumulation: Option<Arc<Accumulation>>,
    job: Option<Arc<Job>>,
    with_optimizer: bool,
    per_process: bool,
    /// Steps that one call makes.
    stride: u64,
}

/// What a checkpoint keeps of a [`Scheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// Steps made: the schedule's step that is set now.
    pub position: u64,
    /// Where a schedule that watches a metric stands.
    pub plateau: Option<PlateauState>,
}

/// The part that a checkpoint reaches as well: the plan, where it stands, and the optimizer's numbers.
pub(crate) struct Course {
    plan: Plan,
    numbers: Arc<Numbers>,
    state: Mutex<SchedulerState>,
}

#[derive(Debug)]
enum Plan {
    Steps(Schedule),
    Metric(Plateau),
}

impl Scheduler {
    /// Takes the optimizer's learning rate over, from the schedule's first value on.
    #[must_use]
    pub fn new(optimizer: &Optimizer, schedule: Schedule) -> Self {
        Self::start(optimizer, Plan::Steps(schedule), None)
    }

    /// Takes the optimizer's learning rate over, and lowers it when a metric stops getting better. It
    /// moves by [`Scheduler::step_with`].
    ///
    /// ```no_run
    /// # use brigade_models::{Cnn, Model};
    /// use brigade_plan::Plateau;
    /// use brigade_train::{Scheduler, Sgd};
    /// # fn f(model: &Model<Cnn>) -> Result<(), Box<dyn std::error::Error>> {
    /// let optimizer = Sgd::new(0.1).build(model)?;
    /// let plateau = Plateau { patience: 2, ..Plateau::new(0.1) };
    /// let mut scheduler = Scheduler::on_plateau(&optimizer, plateau)?;
    /// for loss in [1.0, 0.9, 0.9, 0.9, 0.9] {
    ///     scheduler.step_with(loss)?;
    /// }
    /// assert_eq!(scheduler.lr(), 0.1 * 0.1);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Plan`] for numbers that make no sense.
    pub fn on_plateau(optimizer: &Optimizer, plateau: Plateau) -> Result<Self> {
        plateau.check()?;
        Ok(Self::start(optimizer, Plan::Metric(plateau), Some(plateau.start())))
    }

    fn start(optimizer: &Optimizer, plan: Plan, plateau: Option<PlateauState>) -> Self {
        let state = SchedulerState { position: 0, plateau };
        let course = Course { plan, numbers: optimizer.numbers(), state: Mutex::new(state) };
        course.apply(&state);
        Self {
            course: Arc::new(course),
            accumulation: None,
            job: None,
            with_optimizer: true,
            per_process: false,
            stride: 1,
        }
    }

    /// Accelerate's rule: once prepared, each call makes as many steps as there are processes, unless
    /// the Accelerator splits batches. For a schedule whose length was written down for one process.
    /// Off unless set; a schedule on a metric makes one step per metric all the same.
    #[must_use]
    pub fn step_per_process(mut self, on: bool) -> Self {
        self.per_process = on;
        self
    }

    /// Whether a call does nothing while gradients are being added up, or when the optimizer's step was
    /// left out. On unless set; Accelerate's `step_scheduler_with_optimizer`. Off for a schedule that is
    /// stepped once per epoch.
    #[must_use]
    pub fn step_with_optimizer(mut self, on: bool) -> Self {
        self.with_optimizer = on;
        self
    }

    /// Goes to the next value: call it after the optimizer's step.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a schedule on a metric.
    pub fn step(&mut self) -> Result<()> {
        if matches!(self.course.plan, Plan::Metric(_)) {
            return Err(Error::Misuse(
                "this scheduler watches a metric, and `step` has none: call `step_with(metric)` after \
                 each evaluation"
                    .into(),
            ));
        }
        if self.optimizer_stays() {
            return Ok(());
        }
        self.course.advance(|state| {
            state.position = state.position.saturating_add(self.stride);
        });
        Ok(())
    }

    /// Goes on after an evaluation that gave this metric. Every rank calls it; where the ranks' metrics
    /// differ, their mean counts, so that the learning rate stays the same on all of them.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a schedule that watches no metric; [`Error::Torch`] when a peer is gone.
    pub fn step_with(&mut self, metric: f64) -> Result<()> {
        let Plan::Metric(plateau) = &self.course.plan else {
            return Err(Error::Misuse(
                "this scheduler counts steps and watches no metric: call `step`, or make it with \
                 `Scheduler::on_plateau`"
                    .into(),
            ));
        };
        let metric = self.agreed(metric)?;
        self.course.advance(|state| {
            let before = state.plateau.unwrap_or_else(|| plateau.start());
            state.plateau = Some(plateau.after(&before, metric));
            state.position = state.position.saturating_add(1);
        });
        Ok(())
    }

    /// The learning rate that is set now.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.course.numbers.lr()
    }

    /// Steps counted so far.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.state().position
    }

    /// What a checkpoint keeps.
    #[must_use]
    pub fn state(&self) -> SchedulerState {
        self.course.state()
    }

    /// Continues where another scheduler of the same kind stood, and sets the learning rate of that
    /// step.
    ///
    /// # Errors
    /// [`Error::Misuse`] when one watches a metric and the other does not.
    pub fn load_state(&mut self, state: &SchedulerState) -> Result<()> {
        self.course.load(state)
    }

    fn optimizer_stays(&self) -> bool {
        self.with_optimizer && self.accumulation.as_ref().is_some_and(|a| !a.sync() || a.skipped())
    }

    fn agreed(&self, metric: f64) -> Result<f64> {
        let Some(group) = self.job.as_ref().and_then(|job| job.group()) else {
            return Ok(metric);
        };
        let metrics: Vec<f64> = group.all_gather_object(&metric)?;
        // A mean of equal numbers need not be that number.
        if metrics.iter().all(|it| it.to_bits() == metrics[0].to_bits()) {
            return Ok(metric);
        }
        Ok(metrics.iter().sum::<f64>() / metrics.len() as f64)
    }
}

impl Course {
    pub(crate) fn state(&self) -> SchedulerState {
        *self.lock()
    }

    /// Refuses a state of another kind of scheduler.
    pub(crate) fn fits(&self, state: &SchedulerState) -> Result<()> {
        if matches!(self.plan, Plan::Metric(_)) != state.plateau.is_some() {
            let (found, expected) = match self.plan {
                Plan::Metric(_) => ("counts steps", "watches a metric"),
                Plan::Steps(_) => ("watches a metric", "counts steps"),
            };
            return Err(Error::Misuse(format!(
                "the scheduler's state is of one that {found}, and this one {expected}: make the same \
                 scheduler as in the run that was saved"
            )));
        }
        Ok(())
    }

    pub(crate) fn load(&self, state: &SchedulerState) -> Result<()> {
        self.fits(state)?;
        self.advance(|it| *it = *state);
        Ok(())
    }

    pub(crate) fn lr(&self) -> f64 {
        self.numbers.lr()
    }

    fn advance(&self, change: impl FnOnce(&mut SchedulerState)) {
        let mut state = self.lock();
        change(&mut state);
        self.apply(&state);
    }

    fn apply(&self, state: &SchedulerState) {
        let (lr, momentum) = match &self.plan {
            Plan::Steps(schedule) => {
                (schedule.lr(state.position), schedule.momentum(state.position))
            }
            Plan::Metric(plateau) => (state.plateau.map_or(plateau.lr, |it| it.lr), None),
        };
        self.numbers.set(lr, momentum);
    }

    /// A panic elsewhere does not make the position wrong.
    fn lock(&self) -> MutexGuard<'_, SchedulerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prepare for Scheduler {
    type Prepared = Self;

    fn prepare(mut self, accelerator: &Accelerator) -> Result<Self> {
        self.accumulation = Some(Arc::clone(&accelerator.accumulation));
        self.job = Some(Arc::clone(&accelerator.job));
        if self.per_process && !accelerator.options.loader.split_batches {
            self.stride = accelerator.num_processes() as u64;
        }
        accelerator.registry.register(&self.course);
        Ok(self)
    }
}

impl fmt::Debug for Course {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Course")
            .field("plan", &self.plan)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("world", &self.world).finish_non_exhaustive()
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numbers").field("lr", &self.lr()).finish_non_exhaustive()
    }
}
