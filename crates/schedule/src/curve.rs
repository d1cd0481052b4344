//! What a schedule is made of: curves, and schedules one after the other.

use std::f64::consts::PI;

use super::Schedule;
use super::one_cycle::{FitOneCycle, OneCycle, two_cosines};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Curve {
    Constant {
        lr: f64,
    },
    Linear {
        start: f64,
        end: f64,
        steps: u64,
    },
    Cosine {
        start: f64,
        end: f64,
        steps: u64,
    },
    Restarts {
        start: f64,
        end: f64,
        first: u64,
        factor: u64,
    },
    FlatCosine {
        lr: f64,
        end: f64,
        steps: u64,
        pct_start: f64,
    },
    Polynomial {
        start: f64,
        end: f64,
        steps: u64,
        power: f64,
    },
    Step {
        lr: f64,
        every: u64,
        gamma: f64,
    },
    MultiStep {
        lr: f64,
        milestones: Vec<u64>,
        gamma: f64,
    },
    InverseSqrt {
        lr: f64,
        timescale: u64,
    },
    OneCycle(OneCycle),
    FitOneCycle(FitOneCycle),
    /// A rise from `factor` times the schedule's first rate, then the schedule.
    Warmup {
        steps: u64,
        factor: f64,
        then: Box<Schedule>,
    },
    /// Each with the step at which it begins, the first at 0, in rising order.
    Sequence(Vec<(u64, Schedule)>),
    /// The rate of the first, and the values of the second as momentum.
    Momentum {
        rate: Box<Schedule>,
        momentum: Box<Schedule>,
    },
}

impl Curve {
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

/// How far `step` is in its period, and how long that is. Each period is `factor` times as long as the
/// one before.
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

pub(super) fn line(start: f64, end: f64, part: f64) -> f64 {
    start + (end - start) * part
}

pub(super) fn half_cosine(start: f64, end: f64, part: f64) -> f64 {
    end + (start - end) / 2.0 * (1.0 + (PI * part).cos())
}
