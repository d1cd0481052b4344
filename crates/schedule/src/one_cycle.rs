//! One-cycle schedules: the rate rises and falls, and the momentum moves the other way.

use serde::{Deserialize, Serialize};

use super::bounds::{bad, count, rate};
use super::interpolation::{half_cosine, line, two_cosines};
use crate::ScheduleError;

/// Settings of a one-cycle schedule as in torch's `OneCycleLR` (Smith and Topin 2018).
///
/// The rate goes from `max_lr / div_factor` to `max_lr` in the first `pct_start` of the steps, then
/// down to `max_lr / div_factor / final_div_factor`; the momentum goes from `max_momentum` to
/// `base_momentum` and back. Steps past the end keep the last values.
///
/// ```
/// use brigade_schedule::{OneCycle, Schedule};
///
/// let schedule = Schedule::one_cycle(OneCycle::new(0.3, 41))?;
/// assert!((schedule.lr(0) - 0.3 / 25.0).abs() < 1e-15);
/// assert_eq!(schedule.momentum(0), Some(0.95));
/// # Ok::<(), brigade_schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OneCycle {
    /// Maximum learning rate.
    pub max_lr: f64,
    /// Number of optimizer steps in the cycle.
    pub total_steps: u64,
    /// Share of the steps in which the rate rises.
    pub pct_start: f64,
    /// Divisor of `max_lr` that gives the initial rate.
    pub div_factor: f64,
    /// Divisor of the initial rate that gives the final rate.
    pub final_div_factor: f64,
    /// Momentum at the maximum rate.
    pub base_momentum: f64,
    /// Momentum at the initial and the final rate.
    pub max_momentum: f64,
    /// Shape of the rise and the fall.
    pub anneal: Anneal,
    /// `true` for three phases: the rate falls to the initial rate in as many steps as it rose, and then to the final
    /// rate. `false` for two phases: the rate falls to the final rate at once after its rise.
    pub three_phase: bool,
}

/// Shape of the change from one value to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Anneal {
    /// Cosine annealing: half a cosine wave.
    #[default]
    Cosine,
    /// Linear annealing: a straight line.
    Linear,
}

impl OneCycle {
    /// Creates a cycle with torch's defaults: `pct_start` 0.3, divisors 25 and 10 000, momentum between 0.85 and 0.95,
    /// cosine annealing, two phases.
    #[must_use]
    pub fn new(max_lr: f64, total_steps: u64) -> Self {
        Self {
            max_lr,
            total_steps,
            pct_start: 0.3,
            div_factor: 25.0,
            final_div_factor: 1e4,
            base_momentum: 0.85,
            max_momentum: 0.95,
            anneal: Anneal::Cosine,
            three_phase: false,
        }
    }

    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        rate("highest rate", self.max_lr)?;
        rate("lowest momentum", self.base_momentum)?;
        rate("highest momentum", self.max_momentum)?;
        divisor("divisor", self.div_factor)?;
        divisor("final divisor", self.final_div_factor)?;
        part_of_the_steps(self.pct_start)?;
        count("number of steps", self.total_steps)?;
        let [rise, fall, last] = self.phases();
        if rise.end <= 0.0 || fall.end < rise.end || last.end < fall.end {
            return Err(bad(
                "number of steps",
                self.total_steps as f64,
                "such that, with the part that rises, each phase ends after the one before",
            ));
        }
        Ok(())
    }

    /// The phases by the (fractional) step at which each ends. torch's arithmetic, `- 1` included:
    /// the highest rate falls on step `pct_start * total_steps - 1`. Where there are two, the third
    /// has no length.
    fn phases(&self) -> [Phase; 3] {
        let first = self.max_lr / self.div_factor;
        let last = first / self.final_div_factor;
        let (low, high) = (self.base_momentum, self.max_momentum);
        let total = self.total_steps as f64;
        let rise = Phase {
            end: self.pct_start * total - 1.0,
            lr: (first, self.max_lr),
            momentum: (high, low),
        };
        if self.three_phase {
            let end = 2.0 * self.pct_start * total - 2.0;
            let fall = Phase { end, lr: (self.max_lr, first), momentum: (low, high) };
            [rise, fall, Phase { end: total - 1.0, lr: (first, last), momentum: (high, high) }]
        } else {
            let fall = Phase { end: total - 1.0, lr: (self.max_lr, last), momentum: (low, high) };
            [rise, fall, Phase { lr: (last, last), momentum: (high, high), ..fall }]
        }
    }

    /// Returns the phase of `step`, and the position in the phase from 0 to 1.
    fn locate(&self, step: u64) -> (Phase, f64) {
        let step = step.min(self.total_steps - 1) as f64;
        let [rise, fall, last] = self.phases();
        let (phase, start) = if step <= rise.end {
            (rise, 0.0)
        } else if step <= fall.end {
            (fall, rise.end)
        } else {
            (last, fall.end)
        };
        (phase, (step - start) / (phase.end - start))
    }

    pub(super) fn lr(&self, step: u64) -> f64 {
        let (phase, part) = self.locate(step);
        self.between(phase.lr, part)
    }

    pub(super) fn momentum(&self, step: u64) -> f64 {
        let (phase, part) = self.locate(step);
        self.between(phase.momentum, part)
    }

    fn between(&self, (start, end): (f64, f64), part: f64) -> f64 {
        match self.anneal {
            Anneal::Cosine => half_cosine(start, end, part),
            Anneal::Linear => line(start, end, part),
        }
    }
}

/// A piece of [`OneCycle`]: the values at its start and its end.
#[derive(Debug, Clone, Copy)]
struct Phase {
    end: f64,
    lr: (f64, f64),
    momentum: (f64, f64),
}

/// Settings of a one-cycle schedule as in fastai's `fit_one_cycle`.
///
/// The rate goes from `max_lr / div` to `max_lr` in the first `pct_start` of the steps, then down to `max_lr /
/// div_final`, both ways by half a cosine; the momentum goes from `moms[0]` to `moms[1]` and on to `moms[2]`. As in
/// fastai, the last step of the cycle is one short of its end: step `total_steps` and later ones have the final values.
/// It differs from [`OneCycle`] in its defaults, in `div_final`, which divides `max_lr`, and in the step of the maximum
/// rate, which is `pct_start * total_steps`.
///
/// ```
/// use brigade_schedule::{FitOneCycle, Schedule};
///
/// let schedule = Schedule::fit_one_cycle(FitOneCycle::new(1e-3, 8))?;
/// assert!((schedule.lr(0) - 4e-5).abs() < 1e-18);
/// assert_eq!(schedule.lr(2), 1e-3);
/// assert_eq!(schedule.momentum(2), Some(0.85));
/// # Ok::<(), brigade_schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FitOneCycle {
    /// Maximum learning rate.
    pub max_lr: f64,
    /// Number of optimizer steps in the cycle.
    pub total_steps: u64,
    /// Share of the steps in which the rate rises.
    pub pct_start: f64,
    /// Divisor of `max_lr` that gives the initial rate.
    pub div: f64,
    /// Divisor of `max_lr` that gives the final rate.
    pub div_final: f64,
    /// Momentum at the initial, the maximum and the final rate.
    pub moms: [f64; 3],
}

impl FitOneCycle {
    /// Creates a cycle with fastai's defaults: `pct_start` 0.25, divisors 25 and 100 000, momentum between 0.95 and
    /// 0.85.
    #[must_use]
    pub fn new(max_lr: f64, total_steps: u64) -> Self {
        Self {
            max_lr,
            total_steps,
            pct_start: 0.25,
            div: 25.0,
            div_final: 1e5,
            moms: [0.95, 0.85, 0.95],
        }
    }

    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        rate("highest rate", self.max_lr)?;
        divisor("divisor", self.div)?;
        divisor("final divisor", self.div_final)?;
        part_of_the_steps(self.pct_start)?;
        for momentum in self.moms {
            rate("momentum", momentum)?;
        }
        count("number of steps", self.total_steps)
    }

    pub(super) fn lr(&self, step: u64) -> f64 {
        let (first, last) = (self.max_lr / self.div, self.max_lr / self.div_final);
        self.over([first, self.max_lr, last], step)
    }

    pub(super) fn momentum(&self, step: u64) -> f64 {
        self.over(self.moms, step)
    }

    fn over(&self, values: [f64; 3], step: u64) -> f64 {
        two_cosines(
            values,
            self.pct_start,
            step.min(self.total_steps) as f64 / self.total_steps as f64,
        )
    }
}

pub(super) fn divisor(what: &'static str, value: f64) -> Result<(), ScheduleError> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(bad(what, value, "finite and above 0"))
    }
}

pub(super) fn part_of_the_steps(part: f64) -> Result<(), ScheduleError> {
    if (0.0..=1.0).contains(&part) {
        return Ok(());
    }
    Err(bad("part of the steps", part, "from 0 to 1"))
}
