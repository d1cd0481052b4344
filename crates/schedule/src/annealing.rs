//! Curves of the progress of a run, from 0 to 1: fastai's annealings.

use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

use crate::ScheduleError;

/// Annealing: a hyperparameter as a function of the progress of a run, from 0 to 1, as for fastai's `ParamScheduler`.
///
/// ```
/// use brigade_schedule::Annealing;
///
/// let cosine = Annealing::cosine(1.0, 0.0);
/// assert_eq!((cosine.at(0.0), cosine.at(0.5), cosine.at(1.0)), (1.0, 0.5, 0.0));
///
/// // A quarter of the run upwards, the rest down.
/// let cycle = Annealing::combined([
///     (0.25, Annealing::cosine(0.0, 1.0)),
///     (0.75, Annealing::cosine(1.0, 0.0)),
/// ])?;
/// assert_eq!(cycle.at(0.25), 1.0);
/// # Ok::<(), brigade_schedule::ScheduleError>(())
/// ```
#[derive(Clone)]
pub enum Annealing {
    /// Constant value at every progress (fastai's `SchedNo`).
    Constant(f64),
    /// Linear change from `start` to `end` (fastai's `SchedLin`).
    Linear {
        /// Value at progress 0.
        start: f64,
        /// Value at progress 1.
        end: f64,
    },
    /// Cosine annealing: half a period of a cosine from `start` to `end` (fastai's `SchedCos`).
    Cosine {
        /// Value at progress 0.
        start: f64,
        /// Value at progress 1.
        end: f64,
    },
    /// Exponential change from `start` to `end`: equal ratios in equal parts of the run (fastai's `SchedExp`).
    Exponential {
        /// Value at progress 0.
        start: f64,
        /// Value at progress 1.
        end: f64,
    },
    /// Polynomial change from `start` to `end`: a power of the progress (fastai's `SchedPoly`).
    Polynomial {
        /// Value at progress 0.
        start: f64,
        /// Value at progress 1.
        end: f64,
        /// Exponent of the polynomial.
        power: f64,
    },
    /// Sequence of annealings, each with its share of the run.
    Combined(Vec<(f64, Self)>),
    /// A function of the progress.
    Function(Arc<dyn Fn(f64) -> f64 + Send + Sync>),
}

impl Annealing {
    /// Creates a cosine annealing: half a period of a cosine from `start` to `end`.
    #[must_use]
    pub fn cosine(start: f64, end: f64) -> Self {
        Self::Cosine { start, end }
    }

    /// Creates a linear change from `start` to `end`.
    #[must_use]
    pub fn linear(start: f64, end: f64) -> Self {
        Self::Linear { start, end }
    }

    /// Creates an exponential change from `start` to `end`: equal ratios in equal parts of the run.
    #[must_use]
    pub fn exponential(start: f64, end: f64) -> Self {
        Self::Exponential { start, end }
    }

    /// Creates a polynomial change from `start` to `end`: the progress to the power of `power`.
    #[must_use]
    pub fn polynomial(start: f64, end: f64, power: f64) -> Self {
        Self::Polynomial { start, end, power }
    }

    /// Creates an annealing from a function of the progress.
    #[must_use]
    pub fn function(function: impl Fn(f64) -> f64 + Send + Sync + 'static) -> Self {
        Self::Function(Arc::new(function))
    }

    /// Creates a sequence of annealings (fastai's `combine_scheds`), each with its share of the run.
    ///
    /// # Errors
    /// Fails if the list is empty, a share is negative, or the shares do not add up to 1.
    pub fn combined(parts: impl IntoIterator<Item = (f64, Self)>) -> Result<Self, ScheduleError> {
        let parts: Vec<(f64, Self)> = parts.into_iter().collect();
        let sum: f64 = parts.iter().map(|(share, _)| share).sum();
        let negative = parts.iter().find(|(share, _)| share.is_nan() || *share < 0.0);
        if let Some((share, _)) = negative {
            let what = "share of the run";
            return Err(ScheduleError::OutOfRange { what, value: *share, must: "at least 0" });
        }
        if (sum - 1.0).abs() > 1e-9 {
            let what = "sum of the shares of the run";
            return Err(ScheduleError::OutOfRange { what, value: sum, must: "1" });
        }
        Ok(Self::Combined(parts))
    }

    /// Creates a cosine annealing from `start` to `middle` followed by one from `middle` to `end` (fastai's
    /// `combined_cos`).
    ///
    /// # Errors
    /// Fails if `first`, the share of the first annealing, is not between 0 and 1.
    pub fn two_cosines(first: f64, [start, middle, end]: [f64; 3]) -> Result<Self, ScheduleError> {
        Self::combined([
            (first, Self::cosine(start, middle)),
            (1.0 - first, Self::cosine(middle, end)),
        ])
    }

    /// Returns the value at a progress from 0 to 1.
    #[must_use]
    pub fn at(&self, progress: f64) -> f64 {
        match *self {
            Self::Constant(value) => value,
            Self::Linear { start, end } => start + progress * (end - start),
            Self::Cosine { start, end } => {
                start + (1.0 + (PI * (1.0 - progress)).cos()) * (end - start) / 2.0
            }
            Self::Exponential { start, end } => start * (end / start).powf(progress),
            Self::Polynomial { start, end, power } => start + (end - start) * progress.powf(power),
            Self::Function(ref function) => function(progress),
            Self::Combined(ref parts) => {
                let mut begin = 0.0;
                let last = parts.len().saturating_sub(1);
                for (index, (share, part)) in parts.iter().enumerate() {
                    if index == last || progress < begin + share - ROUNDING {
                        let inside = (progress - begin) / share;
                        // A part without a share is over when it begins.
                        let inside = if share.abs() > 0.0 { inside.clamp(0.0, 1.0) } else { 1.0 };
                        return part.at(inside);
                    }
                    begin += share;
                }
                f64::NAN
            }
        }
    }
}

/// A sum of shares and a progress that was added up are equal to this.
const ROUNDING: f64 = 1e-9;

impl fmt::Debug for Annealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant(value) => f.debug_tuple("Constant").field(value).finish(),
            Self::Linear { start, end } => f.debug_tuple("Linear").field(start).field(end).finish(),
            Self::Cosine { start, end } => f.debug_tuple("Cosine").field(start).field(end).finish(),
            Self::Exponential { start, end } => {
                f.debug_tuple("Exponential").field(start).field(end).finish()
            }
            Self::Polynomial { start, end, power } => {
                f.debug_tuple("Polynomial").field(start).field(end).field(power).finish()
            }
            Self::Combined(parts) => f.debug_tuple("Combined").field(parts).finish(),
            Self::Function(_) => f.write_str("Function"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_must_add_up() {
        let part = || Annealing::Constant(1.0);
        for parts in [vec![], vec![(0.5, part())], vec![(1.5, part()), (-0.5, part())]] {
            assert!(Annealing::combined(parts).is_err());
        }
        let exact = Annealing::combined([(0.7, part()), (0.2, part()), (0.1, part())]);
        assert!(exact.is_ok());
    }

    #[test]
    fn a_part_without_a_share_is_passed_over() {
        let curve = Annealing::two_cosines(0.0, [5.0, 1.0, 0.0]).unwrap();
        assert_eq!(curve.at(0.0), 1.0);
        assert_eq!(curve.at(1.0), 0.0);
        let curve = Annealing::two_cosines(1.0, [0.0, 1.0, 7.0]).unwrap();
        assert_eq!(curve.at(1.0), 7.0);
    }
}
