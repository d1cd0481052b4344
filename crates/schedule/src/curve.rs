//! Definitions of schedules: curves, and sequences of schedules.

use serde::{Deserialize, Serialize};

use super::Schedule;
use super::error::ScheduleError;
use super::interpolation::{half_cosine, line, two_cosines};
use super::one_cycle::{FitOneCycle, OneCycle};

/// Definition of a [`Schedule`] in checkpoints: the arguments of its constructor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Curve {
    /// Constant learning rate: [`Schedule::constant`].
    Constant {
        /// Learning rate of every step.
        lr: f64,
    },
    /// Linear change of the learning rate: [`Schedule::linear`].
    Linear {
        /// Initial learning rate.
        start: f64,
        /// Final learning rate.
        end: f64,
        /// Number of optimizer steps from `start` to `end`.
        steps: u64,
    },
    /// Cosine annealing: [`Schedule::cosine`].
    Cosine {
        /// Initial learning rate.
        start: f64,
        /// Minimum learning rate.
        end: f64,
        /// Number of optimizer steps from `start` to `end`.
        steps: u64,
    },
    /// Cosine annealing with warm restarts: [`Schedule::cosine_restarts`].
    Restarts {
        /// Initial learning rate of each period.
        start: f64,
        /// Learning rate that each period falls towards.
        end: f64,
        /// Number of optimizer steps of the first period.
        first: u64,
        /// Factor of the length of each period, relative to the one before.
        factor: u64,
    },
    /// Constant learning rate followed by cosine annealing: [`Schedule::flat_cosine`].
    FlatCosine {
        /// Initial learning rate.
        lr: f64,
        /// Final learning rate.
        end: f64,
        /// Total number of optimizer steps.
        steps: u64,
        /// Share of the steps in which the rate is constant.
        pct_start: f64,
    },
    /// Polynomial decay: [`Schedule::polynomial`].
    Polynomial {
        /// Initial learning rate.
        start: f64,
        /// Final learning rate.
        end: f64,
        /// Number of optimizer steps from `start` to `end`.
        steps: u64,
        /// Exponent of the polynomial.
        power: f64,
    },
    /// Exponential decay: [`Schedule::exponential`].
    Exponential {
        /// Initial learning rate.
        lr: f64,
        /// Factor of the learning rate at each step.
        gamma: f64,
    },
    /// Step decay: [`Schedule::step`].
    Step {
        /// Initial learning rate.
        lr: f64,
        /// Number of optimizer steps between two changes.
        every: u64,
        /// Factor of the learning rate at each change.
        gamma: f64,
    },
    /// Step decay at milestones: [`Schedule::multi_step`].
    MultiStep {
        /// Initial learning rate.
        lr: f64,
        /// Steps at which the rate changes.
        milestones: Vec<u64>,
        /// Factor of the learning rate at each milestone.
        gamma: f64,
    },
    /// Inverse square-root decay: [`Schedule::inverse_sqrt`].
    InverseSqrt {
        /// Initial learning rate.
        lr: f64,
        /// A third of the steps after which the rate is halved.
        timescale: u64,
    },
    /// One-cycle policy of PyTorch: [`Schedule::one_cycle`].
    OneCycle(OneCycle),
    /// One-cycle policy of fastai: [`Schedule::fit_one_cycle`].
    FitOneCycle(FitOneCycle),
    /// Linear warm-up from `factor` times the schedule's initial rate, then the schedule: [`Schedule::warmup`].
    Warmup {
        /// Number of optimizer steps of the warm-up.
        steps: u64,
        /// Share of the schedule's initial rate at which the warm-up begins.
        factor: f64,
        /// Schedule after the warm-up.
        then: Box<Schedule>,
    },
    /// Schedules with the steps at which they begin, the first at 0, in ascending order: [`Schedule::sequence`].
    Sequence(Vec<(u64, Schedule)>),
    /// Schedule of the learning rate with another one for the momentum: [`Schedule::with_momentum`].
    Momentum {
        /// Schedule of the learning rate.
        rate: Box<Schedule>,
        /// Schedule whose values are the momentum.
        momentum: Box<Schedule>,
    },
}

impl Curve {
    /// The same through the constructors, which check its numbers.
    pub(super) fn checked(self) -> Result<Schedule, ScheduleError> {
        match self {
            Self::Constant { lr } => Schedule::constant(lr),
            Self::Linear { start, end, steps } => Schedule::linear(start, end, steps),
            Self::Cosine { start, end, steps } => Schedule::cosine(start, end, steps),
            Self::Restarts { start, end, first, factor } => {
                Schedule::cosine_restarts(start, end, first, factor)
            }
            Self::FlatCosine { lr, end, steps, pct_start } => {
                Schedule::flat_cosine(lr, end, steps, pct_start)
            }
            Self::Polynomial { start, end, steps, power } => {
                Schedule::polynomial(start, end, steps, power)
            }
            Self::Exponential { lr, gamma } => Schedule::exponential(lr, gamma),
            Self::Step { lr, every, gamma } => Schedule::step(lr, every, gamma),
            Self::MultiStep { lr, milestones, gamma } => {
                Schedule::multi_step(lr, &milestones, gamma)
            }
            Self::InverseSqrt { lr, timescale } => Schedule::inverse_sqrt(lr, timescale),
            Self::OneCycle(cycle) => Schedule::one_cycle(cycle),
            Self::FitOneCycle(cycle) => Schedule::fit_one_cycle(cycle),
            Self::Warmup { steps, factor, then } => then.warmup(steps, factor),
            Self::Sequence(parts) => {
                let (begins, schedules): (Vec<u64>, Vec<Schedule>) = parts.into_iter().unzip();
                Schedule::sequence(schedules, begins.get(1..).unwrap_or_default())
            }
            Self::Momentum { rate, momentum } => Ok(rate.with_momentum(*momentum)),
        }
    }
}

impl Curve {
    /// Returns the position of a step in its period and the length of that period, both in steps. `None` for schedules
    /// without restarts.
    #[must_use]
    pub fn period(&self, step: u64) -> Option<(u64, u64)> {
        match *self {
            Self::Restarts { first, factor, .. } => Some(in_period(step, first, factor)),
            _ => None,
        }
    }

    pub(super) fn lr(&self, step: u64) -> f64 {
        match *self {
            Self::Constant { lr } => lr,
            Self::Linear { start, end, steps } => line(start, end, part(step, steps)),
            Self::Cosine { start, end, steps } => {
                // One period is exact where cos of a large number would not be.
                let step = step % steps.saturating_mul(2);
                half_cosine(start, end, step as f64 / steps as f64)
            }
            Self::Restarts { start, end, first, factor } => {
                let (step, period) = in_period(step, first, factor);
                half_cosine(start, end, step as f64 / period as f64)
            }
            Self::FlatCosine { lr, end, steps, pct_start } => {
                two_cosines([lr, lr, end], pct_start, part(step, steps))
            }
            Self::Polynomial { start, end, steps, power } => {
                end + (start - end) * (1.0 - part(step, steps)).powf(power)
            }
            Self::Exponential { lr, gamma } => lr * gamma.powf(step as f64),
            Self::Step { lr, every, gamma } => lr * gamma.powf((step / every) as f64),
            Self::MultiStep { lr, ref milestones, gamma } => {
                let passed = milestones.partition_point(|&milestone| milestone <= step);
                lr * gamma.powf(passed as f64)
            }
            Self::InverseSqrt { lr, timescale } => {
                let timescale = timescale as f64;
                lr * (timescale / (step as f64 + timescale)).sqrt()
            }
            Self::OneCycle(ref cycle) => cycle.lr(step),
            Self::FitOneCycle(ref cycle) => cycle.lr(step),
            Self::Warmup { steps, factor, ref then } if step < steps => {
                then.lr(0) * line(factor, 1.0, step as f64 / steps as f64)
            }
            Self::Warmup { steps, ref then, .. } => then.lr(step - steps),
            Self::Sequence(ref parts) => {
                let (schedule, step) = playing(parts, step);
                schedule.lr(step)
            }
            Self::Momentum { ref rate, .. } => rate.lr(step),
        }
    }

    pub(super) fn momentum(&self, step: u64) -> Option<f64> {
        match self {
            Self::OneCycle(cycle) => Some(cycle.momentum(step)),
            Self::FitOneCycle(cycle) => Some(cycle.momentum(step)),
            Self::Warmup { steps, then, .. } => then.momentum(step.saturating_sub(*steps)),
            Self::Sequence(parts) => {
                let (schedule, step) = playing(parts, step);
                schedule.momentum(step)
            }
            Self::Momentum { momentum, .. } => Some(momentum.lr(step)),
            _ => None,
        }
    }
}

/// The schedule active at `step`, and its own step.
fn playing(parts: &[(u64, Schedule)], step: u64) -> (&Schedule, u64) {
    let place = parts.partition_point(|&(begin, _)| begin <= step) - 1;
    let (begin, schedule) = &parts[place];
    (schedule, step - begin)
}

/// Returns the position of `step` in its period, and the length of the period. Each period is `factor` times as long as
/// the one before.
fn in_period(step: u64, first: u64, factor: u64) -> (u64, u64) {
    if factor == 1 {
        return (step % first, first);
    }
    // At most 64 rounds: periods grow at least twofold.
    let (mut step, mut period) = (step, first);
    while step >= period {
        step -= period;
        period = period.saturating_mul(factor);
    }
    (step, period)
}

fn part(step: u64, steps: u64) -> f64 {
    step.min(steps) as f64 / steps as f64
}
