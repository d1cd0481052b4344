//! A scheduler after [`crate::Accelerator::prepare`]: it steps when the optimizer does, the same on all ranks.

use std::ops::Deref;
use std::sync::Arc;

use brigade_optim::{Scheduler, SchedulerState};

use crate::error::Result;
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::backward::Gradients;
use crate::job::Job;
use crate::recorder::AtReplay;
use crate::registry::{Registry, Saved};

/// A [`Scheduler`] after [`crate::Accelerator::prepare`].
///
/// The schedule is counted in optimizer steps, the same number on 1 rank or 64: `step` does nothing while
/// gradients are still being accumulated, and after an optimizer step that was left out.
///
/// ```
/// use brigade_optim::schedule::Schedule;
/// use brigade_train::{Accelerator, Adam, Scheduler};
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let optimizer = Adam::default().build(&model)?;
/// let scheduler = Scheduler::new(&optimizer, Schedule::linear(0.1, 0.0, 10)?);
/// let (mut optimizer, mut scheduler) = accelerator.prepare((optimizer, scheduler))?;
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(optimizer.lr(), 0.09);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PreparedScheduler {
    scheduler: Scheduler,
    accumulator: GradientAccumulator,
    job: Arc<Job>,
    with_optimizer: bool,
    /// Steps that one call makes.
    stride: u64,
    /// What [`PreparedScheduler::step_per_process`] makes of that.
    processes: u64,
    /// What a checkpoint holds, for as long as it is there.
    _saved: Arc<Saved<Scheduler>>,
}

impl PreparedScheduler {
    /// Prepares a scheduler, and registers what a checkpoint holds of it. `processes`: see
    /// [`PreparedScheduler::step_per_process`].
    pub(crate) fn new(
        scheduler: Scheduler,
        gradients: &Gradients,
        registry: &Registry,
        processes: usize,
    ) -> Self {
        let saved = Arc::new(Saved(scheduler.clone()));
        registry.register(&saved);
        Self {
            scheduler,
            accumulator: gradients.accumulator.clone(),
            job: Arc::clone(&gradients.processes.job),
            with_optimizer: true,
            stride: 1,
            processes: processes as u64,
            _saved: saved,
        }
    }

    /// Accelerate's rule: each call makes as many steps as there are processes, unless the Accelerator
    /// splits batches. For a schedule whose length was written down for one process. Off unless set; a
    /// schedule on a metric makes one step per metric all the same.
    #[must_use]
    pub fn step_per_process(mut self, on: bool) -> Self {
        self.stride = if on { self.processes } else { 1 };
        self
    }

    /// Whether a call does nothing while gradients are being accumulated, or when the optimizer's step was
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
    /// As [`Scheduler::step`].
    pub fn step(&mut self) -> Result<()> {
        if self.job.recorder.is_recording() {
            self.job.recorder.at_each_replay(StepSchedule(self.clone_handle()));
            return Ok(());
        }
        if self.with_optimizer && !self.scheduler.watches_metric() {
            // What is late is the step of an earlier window: this batch makes none.
            if !self.accumulator.sync_gradients() {
                return Ok(());
            }
            if self.accumulator.is_late() {
                self.accumulator.advance_later(self.scheduler.clone(), self.stride);
                return Ok(());
            }
            if self.accumulator.skipped() {
                return Ok(());
            }
        }
        Ok(self.scheduler.advance(self.stride)?)
    }

    /// Goes on after an evaluation that gave this metric. Every rank calls it; where the ranks' metrics
    /// differ, their mean counts, so that the learning rate stays the same on all of them.
    ///
    /// # Errors
    /// As [`Scheduler::step_with`]; [`crate::Error::Torch`] when a peer is gone.
    pub fn step_with(&mut self, metric: f64) -> Result<()> {
        let metric = if self.scheduler.watches_metric() { self.agreed(metric)? } else { metric };
        Ok(self.scheduler.step_with(metric)?)
    }

    /// Continues where another scheduler of the same kind stood, and sets the learning rate of that
    /// step.
    ///
    /// # Errors
    /// As [`Scheduler::load_state`].
    pub fn load_state(&mut self, state: &SchedulerState) -> Result<()> {
        Ok(self.scheduler.load_state(state)?)
    }

    fn clone_handle(&self) -> Self {
        Self {
            scheduler: self.scheduler.clone(),
            accumulator: self.accumulator.clone(),
            job: Arc::clone(&self.job),
            with_optimizer: self.with_optimizer,
            stride: self.stride,
            processes: self.processes,
            _saved: Arc::clone(&self._saved),
        }
    }

    fn agreed(&self, metric: f64) -> Result<f64> {
        let Some(group) = self.job.group() else {
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

impl Deref for PreparedScheduler {
    type Target = Scheduler;

    /// Where a device has to say whether the optimizer's step was made, this waits for it.
    fn deref(&self) -> &Scheduler {
        let _ = self.accumulator.settle();
        &self.scheduler
    }
}

/// A schedule that steps within a recorded step.
struct StepSchedule(PreparedScheduler);

impl AtReplay for StepSchedule {
    fn after(&mut self) -> Result<()> {
        self.0.step()
    }
}
