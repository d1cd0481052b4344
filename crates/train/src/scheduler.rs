//! A schedule that moves an optimizer's learning rate.

use std::sync::Arc;

use brigade_plan::Schedule;

use crate::accelerator::Accelerator;
use crate::accumulate::Accumulation;
use crate::error::Result;
use crate::optim::{Numbers, Optimizer};
use crate::prepare::Prepare;

/// Sets an optimizer's learning rate (and momentum, where the schedule has one) from a schedule.
///
/// The schedule is counted in optimizer steps, the same number on 1 rank or 64. After
/// [`Accelerator::prepare`], `step` does nothing while gradients are still being added up, and
/// after an optimizer step that was left out.
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
    schedule: Schedule,
    numbers: Arc<Numbers>,
    accumulation: Option<Arc<Accumulation>>,
    position: u64,
}

impl Scheduler {
    /// Takes the optimizer's learning rate over, from the schedule's first value on.
    #[must_use]
    pub fn new(optimizer: &Optimizer, schedule: Schedule) -> Self {
        let numbers = optimizer.numbers();
        numbers.set(schedule.lr(0), schedule.momentum(0));
        Self { schedule, numbers, accumulation: None, position: 0 }
    }

    /// Goes to the next value: call it after the optimizer's step.
    ///
    /// # Errors
    /// None today; a scheduler that watches a metric will have some.
    pub fn step(&mut self) -> Result<()> {
        if self.accumulation.as_ref().is_some_and(|a| !a.sync() || a.skipped()) {
            return Ok(());
        }
        self.position += 1;
        self.numbers.set(self.schedule.lr(self.position), self.schedule.momentum(self.position));
        Ok(())
    }

    /// The learning rate that is set now.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.numbers.lr()
    }

    /// Optimizer steps counted so far.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }
}

impl Prepare for Scheduler {
    type Prepared = Self;

    fn prepare(mut self, accelerator: &Accelerator) -> Result<Self> {
        self.accumulation = Some(Arc::clone(&accelerator.accumulation));
        Ok(self)
    }
}

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Numbers").field("lr", &self.lr()).finish_non_exhaustive()
    }
}
