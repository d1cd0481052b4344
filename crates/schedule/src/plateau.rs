//! A learning rate that is reduced when a metric stops improving.

use serde::{Deserialize, Serialize};

use super::bounds::{bad, rate};
use crate::ScheduleError;

/// Reduces the learning rate when a metric stops improving, like torch's `ReduceLROnPlateau`: multiplies the rate by
/// `factor` after more than `patience` consecutive metrics that did not improve on the best one.
///
/// It is a pure state machine: [`Plateau::start`] returns the initial state, [`Plateau::after`] the state after a
/// metric. A checkpoint contains the state.
///
/// ```
/// use brigade_schedule::Plateau;
///
/// let plateau = Plateau { factor: 0.5, patience: 1, ..Plateau::new(0.1) };
/// plateau.check()?;
/// let mut state = plateau.start();
/// for loss in [1.0, 0.8, 0.9, 0.85] {
///     state = plateau.after(&state, loss);
/// }
/// assert_eq!(state.lr, 0.05);
/// # Ok::<(), brigade_schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Plateau {
    /// Initial learning rate.
    pub lr: f64,
    /// Direction in which the metric improves.
    pub mode: Mode,
    /// Factor of the learning rate at each reduction.
    pub factor: f64,
    /// Number of consecutive metrics without improvement that are tolerated before the rate is reduced.
    pub patience: u64,
    /// Minimum improvement over the best metric.
    pub threshold: Threshold,
    /// Number of metrics after a reduction that do not count as without improvement.
    pub cooldown: u64,
    /// Minimum learning rate.
    pub min_lr: f64,
    /// Minimum reduction of the rate. Smaller reductions are not applied.
    pub eps: f64,
}

/// Direction in which a metric improves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Lower is better: a loss.
    #[default]
    Min,
    /// Higher is better: an accuracy.
    Max,
}

/// Minimum difference from the best metric that counts as an improvement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Threshold {
    /// Fraction of the best metric.
    Relative(f64),
    /// Absolute difference from the best metric.
    Absolute(f64),
}

/// State of a [`Plateau`] schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    /// Current learning rate.
    pub lr: f64,
    /// Best metric so far, or `None` before the first one.
    pub best: Option<f64>,
    /// Number of consecutive metrics without improvement.
    pub bad: u64,
    /// Number of metrics that still do not count after a reduction.
    pub cooling: u64,
    /// Number of metrics so far.
    pub seen: u64,
}

impl Plateau {
    /// Creates a schedule with torch's defaults: mode `Min`, factor 0.1, patience 10, relative threshold 1e-4, no
    /// cooldown.
    #[must_use]
    pub fn new(lr: f64) -> Self {
        Self {
            lr,
            mode: Mode::Min,
            factor: 0.1,
            patience: 10,
            threshold: Threshold::Relative(1e-4),
            cooldown: 0,
            min_lr: 0.0,
            eps: 1e-8,
        }
    }

    /// Checks that the settings are in their ranges.
    ///
    /// # Errors
    /// Fails for a rate or threshold that is negative or not finite, or for a factor that is not below 1.
    pub fn check(&self) -> Result<(), ScheduleError> {
        rate("rate", self.lr)?;
        rate("lowest rate", self.min_lr)?;
        rate("smallest change", self.eps)?;
        let (Threshold::Relative(threshold) | Threshold::Absolute(threshold)) = self.threshold;
        rate("threshold", threshold)?;
        if (0.0..1.0).contains(&self.factor) {
            return Ok(());
        }
        Err(bad("factor", self.factor, "at least 0 and below 1"))
    }

    /// Returns the state before the first metric.
    #[must_use]
    pub fn start(&self) -> PlateauState {
        PlateauState { lr: self.lr, best: None, bad: 0, cooling: 0, seen: 0 }
    }

    /// Returns the state after one more metric. NaN is never better.
    #[must_use]
    pub fn after(&self, state: &PlateauState, metric: f64) -> PlateauState {
        let mut next = PlateauState { seen: state.seen.saturating_add(1), ..*state };
        if self.better(metric, state.best) {
            next.best = Some(metric);
            next.bad = 0;
        } else {
            next.bad += 1;
        }
        if next.cooling > 0 {
            next.cooling -= 1;
            next.bad = 0;
        }
        if next.bad > self.patience {
            let reduced = (state.lr * self.factor).max(self.min_lr);
            if state.lr - reduced > self.eps {
                next.lr = reduced;
            }
            next.cooling = self.cooldown;
            next.bad = 0;
        }
        next
    }

    /// torch compares with infinity before the first metric, so infinity itself is not better there.
    fn better(&self, metric: f64, best: Option<f64>) -> bool {
        let Some(best) = best else {
            return match self.mode {
                Mode::Min => metric < f64::INFINITY,
                Mode::Max => metric > f64::NEG_INFINITY,
            };
        };
        match (self.mode, self.threshold) {
            (Mode::Min, Threshold::Relative(part)) => metric < best * (1.0 - part),
            (Mode::Min, Threshold::Absolute(by)) => metric < best - by,
            (Mode::Max, Threshold::Relative(part)) => metric > best * (1.0 + part),
            (Mode::Max, Threshold::Absolute(by)) => metric > best + by,
        }
    }
}
