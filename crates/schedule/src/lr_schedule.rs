//! The trait of schedules, which user-defined schedules implement.

/// Schedule of the learning rate, and optionally of the momentum: a value for each optimizer step.
///
/// Every [`Schedule`](crate::Schedule) implements it, and so does every closure `Fn(u64) -> f64`, like torch's
/// `LambdaLR`, but with the rate itself in place of a factor. A schedule is a function of the step alone, so that a run
/// can be resumed from the step in its checkpoint.
///
/// ```
/// use brigade_schedule::LrSchedule;
///
/// // Triangles (Smith, 2015), and the momentum the other way round.
/// struct Triangular { low: f64, high: f64, half: u64 }
///
/// impl LrSchedule for Triangular {
///     fn lr(&self, step: u64) -> f64 {
///         let position = (step % (2 * self.half)) as f64 / self.half as f64;
///         self.low + (self.high - self.low) * (1.0 - (1.0 - position).abs())
///     }
///
///     fn momentum(&self, step: u64) -> Option<f64> {
///         Some(0.95 - 0.1 * (self.lr(step) - self.low) / (self.high - self.low))
///     }
/// }
///
/// let triangular = Triangular { low: 0.25, high: 0.5, half: 4 };
/// assert_eq!((triangular.lr(0), triangular.lr(4)), (0.25, 0.5));
/// assert_eq!(triangular.momentum(8), Some(0.95));
///
/// let decay = |step: u64| 0.1 * 0.5f64.powi(step as i32);
/// assert_eq!(decay.lr(2), 0.025);
/// assert_eq!(decay.momentum(2), None);
/// ```
pub trait LrSchedule: Send + Sync {
    /// Returns the learning rate of optimizer step `step`, counted from 0: finite and at least 0.
    fn lr(&self, step: u64) -> f64;

    /// Returns the momentum (`betas[0]` of Adam) of optimizer step `step`. `None`, the default, leaves the optimizer's
    /// momentum as it is.
    fn momentum(&self, _step: u64) -> Option<f64> {
        None
    }

    /// Returns the [`Schedule`](crate::Schedule) that checkpoints record. `None`, the default, stands for a
    /// user-defined function.
    fn definition(&self) -> Option<crate::Schedule> {
        None
    }
}

impl<F: Fn(u64) -> f64 + Send + Sync> LrSchedule for F {
    fn lr(&self, step: u64) -> f64 {
        self(step)
    }
}

impl LrSchedule for crate::Schedule {
    fn lr(&self, step: u64) -> f64 {
        Self::lr(self, step)
    }

    fn momentum(&self, step: u64) -> Option<f64> {
        Self::momentum(self, step)
    }

    fn definition(&self) -> Option<crate::Schedule> {
        Some(self.clone())
    }
}

impl LrSchedule for Box<dyn LrSchedule> {
    fn lr(&self, step: u64) -> f64 {
        (**self).lr(step)
    }

    fn momentum(&self, step: u64) -> Option<f64> {
        (**self).momentum(step)
    }

    fn definition(&self) -> Option<crate::Schedule> {
        (**self).definition()
    }
}
