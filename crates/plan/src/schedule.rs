//! Schedules: the learning rate and the momentum of an optimizer step.
//!
//! Steps are counted from 0 and are those of the optimizer, the same number on 1 rank or 64. A
//! schedule is a function of the step, so it has no state to save: resuming is asking for a later
//! step. The curves are torch's; each constructor names its class.

use std::f64::consts::PI;

use crate::PlanError;

/// The rate of each optimizer step.
///
/// ```
/// use brigade_plan::Schedule;
///
/// let schedule = Schedule::cosine(0.1, 0.0, 100)?.warmup(10, 0.1)?;
/// assert_eq!(schedule.lr(0), 0.1 * 0.1);
/// assert_eq!(schedule.lr(10), 0.1);
/// assert!((schedule.lr(60) - 0.05).abs() < 1e-12); // half of the cosine
/// # Ok::<(), brigade_plan::PlanError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    curve: Curve,
    warmup: Option<Warmup>,
}

impl Schedule {
    /// The same rate in every step.
    ///
    /// # Errors
    /// A rate that is negative or not finite.
    pub fn constant(lr: f64) -> Result<Self, PlanError> {
        rate("rate", lr)?;
        Ok(Curve::Constant { lr }.into())
    }

    /// From `start` to `end` in a straight line over `steps` steps, then `end`. torch's `LinearLR`,
    /// with rates in place of factors.
    ///
    /// # Errors
    /// A rate that is negative or not finite, no steps.
    pub fn linear(start: f64, end: f64, steps: u64) -> Result<Self, PlanError> {
        rate("start rate", start)?;
        rate("end rate", end)?;
        count("number of steps", steps)?;
        Ok(Curve::Linear { start, end, steps }.into())
    }

    /// From `start` down to `end` by half a cosine over `steps` steps:
    /// `end + (start - end) * (1 + cos(pi * step / steps)) / 2`. torch's `CosineAnnealingLR`, and as
    /// there the rate rises again after `steps` steps and is back at `start` after twice as many.
    ///
    /// # Errors
    /// A rate that is negative or not finite, no steps.
    pub fn cosine(start: f64, end: f64, steps: u64) -> Result<Self, PlanError> {
        rate("start rate", start)?;
        rate("end rate", end)?;
        count("number of steps", steps)?;
        Ok(Curve::Cosine { start, end, steps }.into())
    }

    /// `lr`, multiplied by `gamma` after every `every` steps. torch's `StepLR`.
    ///
    /// # Errors
    /// A rate or factor that is negative or not finite, `every` of 0.
    pub fn step(lr: f64, every: u64, gamma: f64) -> Result<Self, PlanError> {
        rate("rate", lr)?;
        rate("factor", gamma)?;
        count("number of steps between changes", every)?;
        Ok(Curve::Step { lr, every, gamma }.into())
    }

    /// `lr * gamma^step`. torch's `ExponentialLR`.
    ///
    /// # Errors
    /// A rate or factor that is negative or not finite.
    pub fn exponential(lr: f64, gamma: f64) -> Result<Self, PlanError> {
        Self::step(lr, 1, gamma)
    }

    /// Up to a highest rate and down to nearly nothing, the momentum the other way round: see
    /// [`OneCycle`].
    ///
    /// # Errors
    /// A rate, momentum or divisor that is out of range, `pct_start` outside 0 to 1, or too few steps
    /// for the phases to follow each other.
    pub fn one_cycle(one_cycle: OneCycle) -> Result<Self, PlanError> {
        one_cycle.check()?;
        Ok(Curve::OneCycle(one_cycle).into())
    }

    /// Puts `steps` steps before this schedule in which the rate rises in a straight line from
    /// `start_factor` times its first rate to that rate. The schedule begins after them: its step 0
    /// is step `steps`. torch's `SequentialLR` of a `LinearLR` and this. Called again, it replaces
    /// the warm-up.
    ///
    /// # Errors
    /// No steps, a factor outside 0 to 1.
    pub fn warmup(self, steps: u64, start_factor: f64) -> Result<Self, PlanError> {
        count("number of warm-up steps", steps)?;
        if !(0.0..=1.0).contains(&start_factor) {
            return Err(bad("warm-up factor", start_factor, "from 0 to 1"));
        }
        Ok(Self { warmup: Some(Warmup { steps, start_factor }), ..self })
    }

    /// The learning rate of optimizer step `step`, counted from 0.
    #[must_use]
    pub fn lr(&self, step: u64) -> f64 {
        match self.warmup {
            Some(warmup) if step < warmup.steps => {
                let part = step as f64 / warmup.steps as f64;
                self.curve.lr(0) * line(warmup.start_factor, 1.0, part)
            }
            Some(warmup) => self.curve.lr(step - warmup.steps),
            None => self.curve.lr(step),
        }
    }

    /// The momentum (`betas[0]` of Adam) of optimizer step `step`, where the schedule sets one: only
    /// [`OneCycle`] does. During a warm-up it is that of the schedule's first step.
    #[must_use]
    pub fn momentum(&self, step: u64) -> Option<f64> {
        self.curve.momentum(step.saturating_sub(self.warmup.map_or(0, |warmup| warmup.steps)))
    }
}

/// torch's `OneCycleLR` (Smith and Topin 2018).
///
/// The rate goes from `max_lr / div_factor` to `max_lr` in the first `pct_start` of the steps, then
/// down to `max_lr / div_factor / final_div_factor`; the momentum goes from `max_momentum` to
/// `base_momentum` and back. Steps past the end keep the last values.
///
/// ```
/// use brigade_plan::{OneCycle, Schedule};
///
/// let schedule = Schedule::one_cycle(OneCycle::new(0.3, 41))?;
/// assert!((schedule.lr(0) - 0.3 / 25.0).abs() < 1e-15);
/// assert_eq!(schedule.momentum(0), Some(0.95));
/// # Ok::<(), brigade_plan::PlanError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneCycle {
    /// The highest rate.
    pub max_lr: f64,
    /// Number of optimizer steps in the cycle.
    pub total_steps: u64,
    /// The part of the steps in which the rate rises.
    pub pct_start: f64,
    /// `max_lr` divided by this is the first rate.
    pub div_factor: f64,
    /// The first rate divided by this is the last rate.
    pub final_div_factor: f64,
    /// The momentum at the highest rate.
    pub base_momentum: f64,
    /// The momentum at the first and the last rate.
    pub max_momentum: f64,
    /// The shape of the ways up and down.
    pub anneal: Anneal,
    /// Go back down to the first rate in as many steps as up, and from there to the last rate;
    /// otherwise go down in one piece.
    pub three_phase: bool,
}

/// The shape of the way from one value to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Anneal {
    /// Half a cosine.
    #[default]
    Cosine,
    /// A straight line.
    Linear,
}

impl OneCycle {
    /// A cycle with torch's defaults: 0.3 of the steps up, divisors 25 and 10 000, momentum between
    /// 0.85 and 0.95, cosine, two phases.
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

    fn check(&self) -> Result<(), PlanError> {
        rate("highest rate", self.max_lr)?;
        rate("lowest momentum", self.base_momentum)?;
        rate("highest momentum", self.max_momentum)?;
        for (what, value) in
            [("divisor", self.div_factor), ("final divisor", self.final_div_factor)]
        {
            if !(value.is_finite() && value > 0.0) {
                return Err(bad(what, value, "finite and above 0"));
            }
        }
        if !(0.0..=1.0).contains(&self.pct_start) {
            return Err(bad("part of the steps that rises", self.pct_start, "from 0 to 1"));
        }
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

    /// The phase that `step` lies in, and how far in it the step is, from 0 to 1.
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

    fn between(&self, (start, end): (f64, f64), part: f64) -> f64 {
        match self.anneal {
            Anneal::Cosine => half_cosine(start, end, part),
            Anneal::Linear => line(start, end, part),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Curve {
    Constant { lr: f64 },
    Linear { start: f64, end: f64, steps: u64 },
    Cosine { start: f64, end: f64, steps: u64 },
    Step { lr: f64, every: u64, gamma: f64 },
    OneCycle(OneCycle),
}

impl Curve {
    fn lr(&self, step: u64) -> f64 {
        match *self {
            Self::Constant { lr } => lr,
            Self::Linear { start, end, steps } => {
                line(start, end, step.min(steps) as f64 / steps as f64)
            }
            Self::Cosine { start, end, steps } => {
                // One period is exact where cos of a large number would not be.
                let step = step % steps.saturating_mul(2);
                half_cosine(start, end, step as f64 / steps as f64)
            }
            Self::Step { lr, every, gamma } => lr * gamma.powf((step / every) as f64),
            Self::OneCycle(one_cycle) => {
                let (phase, part) = one_cycle.locate(step);
                one_cycle.between(phase.lr, part)
            }
        }
    }

    fn momentum(&self, step: u64) -> Option<f64> {
        let Self::OneCycle(one_cycle) = self else { return None };
        let (phase, part) = one_cycle.locate(step);
        Some(one_cycle.between(phase.momentum, part))
    }
}

impl From<Curve> for Schedule {
    fn from(curve: Curve) -> Self {
        Self { curve, warmup: None }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Warmup {
    steps: u64,
    start_factor: f64,
}

/// A piece of [`OneCycle`]: the values at its start and its end.
#[derive(Debug, Clone, Copy)]
struct Phase {
    end: f64,
    lr: (f64, f64),
    momentum: (f64, f64),
}

fn line(start: f64, end: f64, part: f64) -> f64 {
    start + (end - start) * part
}

fn half_cosine(start: f64, end: f64, part: f64) -> f64 {
    end + (start - end) / 2.0 * (1.0 + (PI * part).cos())
}

fn rate(what: &'static str, value: f64) -> Result<(), PlanError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(bad(what, value, "finite and at least 0"))
}

fn count(what: &'static str, steps: u64) -> Result<(), PlanError> {
    if steps > 0 {
        return Ok(());
    }
    Err(PlanError::Zero { what })
}

fn bad(what: &'static str, value: f64, must: &'static str) -> PlanError {
    PlanError::BadSchedule { what, value, must }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_past_the_end_stay() {
        let linear = Schedule::linear(0.2, 0.1, 4).unwrap();
        assert_eq!(
            (linear.lr(2), linear.lr(4), linear.lr(u64::MAX)),
            (0.15000000000000002, 0.1, 0.1)
        );
        let one_cycle = Schedule::one_cycle(OneCycle::new(0.3, 41)).unwrap();
        assert_eq!(one_cycle.lr(41), one_cycle.lr(40));
        assert_eq!(one_cycle.momentum(1_000), one_cycle.momentum(40));
        let only_up = OneCycle { pct_start: 1.0, ..OneCycle::new(0.3, 41) };
        assert_eq!(Schedule::one_cycle(only_up).unwrap().lr(99), 0.3);
    }

    #[test]
    fn only_one_cycle_sets_a_momentum_and_a_warmup_holds_its_first() {
        assert_eq!(Schedule::constant(0.1).unwrap().momentum(3), None);
        let one_cycle = Schedule::one_cycle(OneCycle::new(0.3, 41)).unwrap();
        let warm = one_cycle.warmup(5, 0.0).unwrap();
        assert_eq!((warm.lr(0), warm.momentum(3)), (0.0, Some(0.95)));
        assert_eq!((warm.lr(5), warm.momentum(17)), (one_cycle.lr(0), one_cycle.momentum(12)));
    }

    #[test]
    fn impossible_schedules_are_errors() {
        let text = |schedule: Result<Schedule, PlanError>| schedule.unwrap_err().to_string();
        assert_eq!(
            text(Schedule::constant(-1.0)),
            "the schedule's rate is -1: it must be finite and at least 0"
        );
        assert!(text(Schedule::constant(f64::NAN)).contains("NaN"));
        assert!(text(Schedule::cosine(0.1, 0.0, 0)).starts_with("the number of steps is 0"));
        assert!(text(Schedule::step(0.1, 0, 0.5)).starts_with("the number of steps between"));
        assert!(text(Schedule::exponential(0.1, f64::INFINITY)).contains("factor is inf"));
        assert!(text(Schedule::constant(0.1).unwrap().warmup(0, 0.1)).contains("warm-up steps"));
        assert!(text(Schedule::constant(0.1).unwrap().warmup(3, 1.5)).contains("from 0 to 1"));
        let one_cycle = |edit: fn(&mut OneCycle)| {
            let mut options = OneCycle::new(0.3, 41);
            edit(&mut options);
            text(Schedule::one_cycle(options))
        };
        assert!(one_cycle(|o| o.total_steps = 0).starts_with("the number of steps is 0"));
        assert!(one_cycle(|o| o.total_steps = 3).contains("each phase"));
        assert!(one_cycle(|o| o.pct_start = 1.1).contains("from 0 to 1"));
        assert!(one_cycle(|o| o.pct_start = 0.0).contains("each phase"));
        assert!(one_cycle(|o| o.div_factor = 0.0).contains("finite and above 0"));
        assert!(
            one_cycle(|o| {
                o.three_phase = true;
                o.pct_start = 0.9;
            })
            .contains("each phase")
        );
    }
}
