//! Learning-rate schedules: the learning rate and the momentum as functions of the optimizer's step.
//!
//! Steps are counted from 0 and are those of the optimizer, the same number on 1 rank or 64. A schedule is a function
//! of the step, so it has no state to save: a resumed run evaluates it at a later step. The curves are torch's and
//! fastai's; the documentation of each constructor names its source. A schedule that follows a metric has a state, and
//! is a [`Plateau`].
//!
//! ```
//! use brigade_schedule::Schedule;
//!
//! let schedule = Schedule::cosine(0.1, 0.0, 100)?.warmup(10, 0.1)?;
//! assert_eq!(schedule.lr(0), 0.1 * 0.1);
//! assert_eq!(schedule.lr(10), 0.1);
//! assert!((schedule.lr(60) - 0.05).abs() < 1e-12); // half of the cosine
//! # Ok::<(), brigade_schedule::ScheduleError>(())
//! ```

mod annealing;
mod bounds;
mod curve;
mod definition;
mod error;
mod interpolation;
mod lr_schedule;
mod named;
mod one_cycle;
mod plateau;
#[cfg(test)]
mod tests;

use bounds::{bad, count, rate, rising};
use serde::{Deserialize, Deserializer, Serialize, de};

pub use annealing::Annealing;
pub use curve::Curve;
pub use definition::{Definition, Described};
pub use error::ScheduleError;
pub use lr_schedule::LrSchedule;
pub use named::{Arguments, NamedSchedule, Parameter, ParameterKind};
pub use one_cycle::{Anneal, FitOneCycle, OneCycle};
pub use plateau::{Mode, Plateau, PlateauState, Threshold};

/// Schedule of the learning rate: the rate of each optimizer step.
///
/// ```
/// use brigade_schedule::Schedule;
///
/// let schedule = Schedule::cosine(0.1, 0.0, 100)?.warmup(10, 0.1)?;
/// assert_eq!(schedule.lr(0), 0.1 * 0.1);
/// assert_eq!(schedule.lr(10), 0.1);
/// assert!((schedule.lr(60) - 0.05).abs() < 1e-12); // half of the cosine
/// # Ok::<(), brigade_schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Schedule {
    curve: Curve,
}

impl Schedule {
    /// Creates a schedule with the same rate in every step.
    ///
    /// # Errors
    /// Fails for a rate that is negative or not finite.
    pub fn constant(lr: f64) -> Result<Self, ScheduleError> {
        rate("rate", lr)?;
        Ok(Curve::Constant { lr }.into())
    }

    /// Creates a schedule that changes linearly from `start` to `end` over `steps` steps and then stays at `end`, like
    /// torch's `LinearLR`, with rates in place of factors.
    ///
    /// # Errors
    /// Fails for a rate that is negative or not finite, or if `steps` is 0.
    pub fn linear(start: f64, end: f64, steps: u64) -> Result<Self, ScheduleError> {
        span(start, end, steps)?;
        Ok(Curve::Linear { start, end, steps }.into())
    }

    /// Creates a cosine annealing from `start` down to `end` over `steps` steps: `end + (start - end) * (1 + cos(pi *
    /// step / steps)) / 2`. As in torch's `CosineAnnealingLR`, the rate rises again after `steps` steps and is back at
    /// `start` after twice as many.
    ///
    /// # Errors
    /// Fails for a rate that is negative or not finite, or if `steps` is 0.
    pub fn cosine(start: f64, end: f64, steps: u64) -> Result<Self, ScheduleError> {
        span(start, end, steps)?;
        Ok(Curve::Cosine { start, end, steps }.into())
    }

    /// Creates a cosine annealing from `start` down towards `end` with warm restarts: the first period has `first`
    /// steps, each following one `factor` times as many as the one before. Like torch's `CosineAnnealingWarmRestarts`
    /// (Loshchilov and Hutter 2016) and fastai's `fit_sgdr`.
    ///
    /// ```
    /// use brigade_schedule::Schedule;
    ///
    /// let schedule = Schedule::cosine_restarts(0.1, 0.0, 6, 2)?;
    /// assert_eq!((schedule.lr(0), schedule.lr(6), schedule.lr(18)), (0.1, 0.1, 0.1));
    /// assert!((schedule.lr(12) - 0.05).abs() < 1e-15); // the middle of the second time
    /// # Ok::<(), brigade_schedule::ScheduleError>(())
    /// ```
    ///
    /// # Errors
    /// Fails for a rate that is negative or not finite, or if `first` or `factor` is 0.
    pub fn cosine_restarts(
        start: f64,
        end: f64,
        first: u64,
        factor: u64,
    ) -> Result<Self, ScheduleError> {
        span(start, end, first)?;
        count("factor between periods", factor)?;
        Ok(Curve::Restarts { start, end, first, factor }.into())
    }

    /// Creates a schedule that stays at `lr` for `pct_start` of the steps and then falls to `end` by cosine annealing,
    /// which it reaches at step `steps`. Like fastai's `fit_flat_cos`, whose defaults are 0.75 and `lr / 100 000`.
    ///
    /// # Errors
    /// Fails for a rate that is negative or not finite, if `steps` is 0, or if `pct_start` is outside 0 to 1.
    pub fn flat_cosine(
        lr: f64,
        end: f64,
        steps: u64,
        pct_start: f64,
    ) -> Result<Self, ScheduleError> {
        span(lr, end, steps)?;
        one_cycle::part_of_the_steps(pct_start)?;
        Ok(Curve::FlatCosine { lr, end, steps, pct_start }.into())
    }

    /// Creates a polynomial decay from `start` to `end`: `end + (start - end) * (1 - step / steps)^power`, then `end`.
    /// Like torch's `PolynomialLR`, which ends at 0.
    ///
    /// # Errors
    /// Fails for a rate that is negative or not finite, if `steps` is 0, or for a power that is not finite or not
    /// above 0.
    pub fn polynomial(start: f64, end: f64, steps: u64, power: f64) -> Result<Self, ScheduleError> {
        span(start, end, steps)?;
        one_cycle::divisor("power", power)?;
        Ok(Curve::Polynomial { start, end, steps, power }.into())
    }

    /// Creates an exponential decay: `lr * gamma^step`. Like torch's `ExponentialLR`.
    ///
    /// # Errors
    /// Fails for a rate or factor that is negative or not finite.
    pub fn exponential(lr: f64, gamma: f64) -> Result<Self, ScheduleError> {
        rate("rate", lr)?;
        rate("factor", gamma)?;
        Ok(Curve::Exponential { lr, gamma }.into())
    }

    /// Creates a step decay: `lr`, multiplied by `gamma` after every `every` steps. Like torch's `StepLR`.
    ///
    /// # Errors
    /// Fails for a rate or factor that is negative or not finite, or if `every` is 0.
    pub fn step(lr: f64, every: u64, gamma: f64) -> Result<Self, ScheduleError> {
        rate("rate", lr)?;
        rate("factor", gamma)?;
        count("number of steps between changes", every)?;
        Ok(Curve::Step { lr, every, gamma }.into())
    }

    /// Creates a step decay at milestones: `lr`, multiplied by `gamma` at each of the steps in `milestones`. Like
    /// torch's `MultiStepLR`.
    ///
    /// # Errors
    /// Fails for a rate or factor that is negative or not finite, or for milestones that are not in ascending order.
    pub fn multi_step(lr: f64, milestones: &[u64], gamma: f64) -> Result<Self, ScheduleError> {
        rate("rate", lr)?;
        rate("factor", gamma)?;
        rising("milestones", milestones)?;
        Ok(Curve::MultiStep { lr, milestones: milestones.to_vec(), gamma }.into())
    }

    /// Creates an inverse square-root decay: `lr * sqrt(timescale / (step + timescale))`, which is `lr` at step 0 and
    /// half of it after three timescales. With [`Schedule::warmup`] of `timescale` steps it is the schedule of
    /// "Attention is all you need", and Hugging Face's `get_inverse_sqrt_schedule`.
    ///
    /// # Errors
    /// Fails for a rate that is negative or not finite, or if `timescale` is 0.
    pub fn inverse_sqrt(lr: f64, timescale: u64) -> Result<Self, ScheduleError> {
        rate("rate", lr)?;
        count("timescale", timescale)?;
        Ok(Curve::InverseSqrt { lr, timescale }.into())
    }

    /// Creates a one-cycle schedule: the rate rises to a maximum and falls to nearly 0, and the momentum moves the
    /// other way. See [`OneCycle`].
    ///
    /// # Errors
    /// Fails if a rate, momentum or divisor is out of range, `pct_start` is outside 0 to 1, or there are too few steps
    /// for the phases to follow each other.
    pub fn one_cycle(one_cycle: OneCycle) -> Result<Self, ScheduleError> {
        one_cycle.check()?;
        Ok(Curve::OneCycle(one_cycle).into())
    }

    /// Creates a one-cycle schedule in fastai's shape, see [`FitOneCycle`].
    ///
    /// # Errors
    /// Fails if a rate, momentum or divisor is out of range, `pct_start` is outside 0 to 1, or there are no steps.
    pub fn fit_one_cycle(cycle: FitOneCycle) -> Result<Self, ScheduleError> {
        cycle.check()?;
        Ok(Curve::FitOneCycle(cycle).into())
    }

    /// Creates a sequence of schedules: the first from step 0, each of the others from its milestone on. Each counts
    /// its own steps from 0. Like torch's `SequentialLR`, with the schedules' own rates.
    ///
    /// ```
    /// use brigade_schedule::Schedule;
    ///
    /// let up = Schedule::linear(0.0, 0.1, 10)?;
    /// let flat = Schedule::constant(0.1)?;
    /// let down = Schedule::cosine(0.1, 0.0, 20)?;
    /// let schedule = Schedule::sequence(vec![up, flat, down], &[10, 80])?;
    /// assert_eq!((schedule.lr(5), schedule.lr(79)), (0.05, 0.1));
    /// assert!((schedule.lr(90) - 0.05).abs() < 1e-15);
    /// # Ok::<(), brigade_schedule::ScheduleError>(())
    /// ```
    ///
    /// # Errors
    /// Fails if there are no schedules, the number of milestones is not one less than that of the schedules, the first
    /// milestone is 0, or the milestones are not in ascending order.
    pub fn sequence(schedules: Vec<Self>, milestones: &[u64]) -> Result<Self, ScheduleError> {
        count("number of schedules in the sequence", schedules.len() as u64)?;
        if schedules.len() != milestones.len() + 1 {
            return Err(ScheduleError::Milestones {
                schedules: schedules.len(),
                milestones: milestones.len(),
            });
        }
        count("first milestone", milestones.first().copied().unwrap_or(1))?;
        rising("milestones", milestones)?;
        let begins = std::iter::once(0).chain(milestones.iter().copied());
        Ok(Curve::Sequence(begins.zip(schedules).collect()).into())
    }

    /// Adds a linear warm-up of `steps` steps before this schedule, from `start_factor` times the schedule's initial
    /// rate to that rate. The schedule begins after the warm-up: its step 0 is step `steps`. Like torch's
    /// `SequentialLR` of a `LinearLR` and the schedule. A second call replaces the warm-up.
    ///
    /// # Errors
    /// Fails if `steps` is 0 or the factor is outside 0 to 1.
    pub fn warmup(self, steps: u64, start_factor: f64) -> Result<Self, ScheduleError> {
        count("number of warm-up steps", steps)?;
        if !(0.0..=1.0).contains(&start_factor) {
            return Err(bad("warm-up factor", start_factor, "from 0 to 1"));
        }
        let then = match self.curve {
            Curve::Warmup { then, .. } => then,
            curve => Box::new(curve.into()),
        };
        Ok(Curve::Warmup { steps, factor: start_factor, then }.into())
    }

    /// Sets the schedule's momentum (`betas[0]` of Adam) to the values of the schedule `momentum`, in place of its own,
    /// if it has one.
    ///
    /// ```
    /// use brigade_schedule::Schedule;
    ///
    /// let momentum = Schedule::linear(0.85, 0.95, 10)?;
    /// let schedule = Schedule::cosine(0.1, 0.0, 10)?.with_momentum(momentum);
    /// assert_eq!(schedule.momentum(10), Some(0.95));
    /// # Ok::<(), brigade_schedule::ScheduleError>(())
    /// ```
    #[must_use]
    pub fn with_momentum(self, momentum: Self) -> Self {
        let rate = match self.curve {
            Curve::Momentum { rate, .. } => rate,
            curve => Box::new(curve.into()),
        };
        Curve::Momentum { rate, momentum: Box::new(momentum) }.into()
    }

    /// Returns the definition of the schedule: the arguments of its constructor.
    #[must_use]
    pub fn curve(&self) -> &Curve {
        &self.curve
    }

    /// Returns the learning rate of optimizer step `step`, counted from 0.
    #[must_use]
    pub fn lr(&self, step: u64) -> f64 {
        self.curve.lr(step)
    }

    /// Returns the momentum (`betas[0]` of Adam) of optimizer step `step`, or `None` if the schedule does not set one.
    /// [`OneCycle`], [`FitOneCycle`] and [`Schedule::with_momentum`] set it. During a warm-up it is the momentum of the
    /// schedule's first step.
    #[must_use]
    pub fn momentum(&self, step: u64) -> Option<f64> {
        self.curve.momentum(step)
    }
}

impl From<Curve> for Schedule {
    fn from(curve: Curve) -> Self {
        Self { curve }
    }
}

/// Checks the numbers as the constructors do.
impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Curve::deserialize(deserializer)?.checked().map_err(de::Error::custom)
    }
}

fn span(start: f64, end: f64, steps: u64) -> Result<(), ScheduleError> {
    rate("start rate", start)?;
    rate("end rate", end)?;
    count("number of steps", steps)
}
