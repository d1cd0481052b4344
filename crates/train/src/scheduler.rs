//! A scheduler after [`crate::Accelerator::prepare`]: it steps when the optimizer does, the same on all ranks.

use std::sync::Arc;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_optim::{Scheduler, SchedulerState};
use brigade_torch::Result;
use tch::Tensor;

use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::backward::Gradients;
use crate::job::Job;
use crate::recorder::AtReplay;
use crate::registry::{Checkpointed, Kind, Registry};
use crate::stateful::{Stateful, stateful_handle};

/// A [`Scheduler`] prepared by [`crate::Accelerator::prepare`].
///
/// The schedule is counted in optimizer steps, whose number is the same on 1 rank or 64: `step` does nothing while
/// gradients are still being accumulated, and after a skipped optimizer step.
///
/// ```
/// use brigade_schedule::Schedule;
/// use brigade_optim::{Adam, Scheduler};
/// use brigade_train::Accelerator;
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let optimizer = Adam::default().build(&model)?;
/// let scheduler = Scheduler::new(&optimizer, Schedule::linear(0.1, 0.0, 10)?);
/// let (mut optimizer, mut scheduler) = accelerator.prepare((optimizer, scheduler))?;
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(optimizer.lr()?, 0.09);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PreparedScheduler {
    inner: Arc<SchedulerInner>,
    with_optimizer: bool,
    /// Number of steps that one call makes.
    stride: u64,
    /// Number of steps per call, as set by [`PreparedScheduler::step_per_process`].
    processes: u64,
}

/// State of a prepared scheduler that the program's handle and checkpoints share.
#[derive(Debug)]
pub(crate) struct SchedulerInner {
    scheduler: Scheduler,
    accumulator: GradientAccumulator,
    job: Arc<Job>,
}

impl PreparedScheduler {
    /// Prepares a scheduler, and registers it for checkpoints. `processes`: see
    /// [`PreparedScheduler::step_per_process`].
    pub(crate) fn new(
        scheduler: Scheduler,
        gradients: &Gradients,
        registry: &Registry,
        processes: usize,
    ) -> Self {
        let inner = Arc::new(SchedulerInner {
            scheduler,
            accumulator: gradients.accumulator.clone(),
            job: Arc::clone(&gradients.processes.job),
        });
        registry.register(&inner);
        Self { inner, with_optimizer: true, stride: 1, processes: processes as u64 }
    }

    /// Sets whether each call makes as many steps as there are processes, unless the Accelerator splits batches
    /// (Accelerate's rule): for a schedule whose length was written for one process. Defaults to `false`. A schedule on
    /// a metric always makes one step per metric.
    #[must_use]
    pub fn step_per_process(mut self, on: bool) -> Self {
        self.stride = if on { self.processes } else { 1 };
        self
    }

    /// Sets whether a call does nothing while gradients are being accumulated, or when the optimizer's step was skipped
    /// (Accelerate's `step_scheduler_with_optimizer`). Defaults to `true`. Turn it off for a schedule that is stepped
    /// once per epoch.
    #[must_use]
    pub fn step_with_optimizer(mut self, on: bool) -> Self {
        self.with_optimizer = on;
        self
    }

    /// Moves to the next step of the schedule: call it after the optimizer's step.
    ///
    /// # Errors
    /// Returns the same errors as [`Scheduler::step`].
    pub fn step(&mut self) -> Result<()> {
        let SchedulerInner { scheduler, accumulator, job } = &*self.inner;
        if job.recorder.is_recording() {
            let handle = Self { inner: Arc::clone(&self.inner), ..*self };
            job.recorder.at_each_replay(StepSchedule(handle));
            return Ok(());
        }
        let mut scheduler = scheduler.clone();
        if self.with_optimizer && !scheduler.watches_metric() {
            // Only the step of an earlier window can be pending: this batch makes no step.
            if !accumulator.sync_gradients() {
                return Ok(());
            }
            if accumulator.is_late() {
                accumulator.advance_later(scheduler, self.stride);
                return Ok(());
            }
            if accumulator.skipped() {
                return Ok(());
            }
        }
        scheduler.advance(self.stride)
    }

    /// Steps a schedule that follows a metric, after an evaluation. Every rank calls it; if the ranks' metrics differ,
    /// their mean is used, so that the learning rate stays the same on all of them.
    ///
    /// # Errors
    /// Returns the same errors as [`Scheduler::step_with`], and [`brigade_torch::ErrorKind::Communication`] when a peer
    /// is gone.
    pub fn step_with(&mut self, metric: f64) -> Result<()> {
        let mut scheduler = self.inner.scheduler.clone();
        let metric = if scheduler.watches_metric() { self.inner.agreed(metric)? } else { metric };
        scheduler.step_with(metric)
    }

    /// Returns a handle of the scheduler itself, for operations that this type has no method for. Waits until the
    /// device has reported whether the optimizer's last step was made.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedOptimizer::settled`](crate::PreparedOptimizer::settled).
    pub fn settled(&self) -> Result<Scheduler> {
        self.inner.settled().cloned()
    }

    /// Returns the learning rate that the scheduler set last, as [`Scheduler::lr`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedScheduler::settled`].
    pub fn lr(&self) -> Result<f64> {
        Ok(self.inner.settled()?.lr())
    }

    /// Returns the number of steps that the scheduler has made, as [`Scheduler::position`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedScheduler::settled`].
    pub fn position(&self) -> Result<u64> {
        Ok(self.inner.settled()?.position())
    }

    /// Returns the state of the scheduler for a checkpoint, as [`Scheduler::state`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedScheduler::settled`].
    pub fn state(&self) -> Result<SchedulerState> {
        Ok(self.inner.settled()?.state())
    }

    /// Loads the state of another scheduler of the same kind, and sets the learning rate of that step.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedScheduler::settled`] and [`Scheduler::load_state`].
    pub fn load_state(&mut self, state: &SchedulerState) -> Result<()> {
        self.settled()?.load_state(state)
    }
}

impl SchedulerInner {
    fn settled(&self) -> Result<&Scheduler> {
        self.accumulator.settle()?;
        Ok(&self.scheduler)
    }

    fn agreed(&self, metric: f64) -> Result<f64> {
        let Some(group) = self.job.group() else {
            return Ok(metric);
        };
        let metrics: Vec<f64> = group.all_gather_object(&metric)?;
        // The mean of equal numbers may differ from them by rounding.
        if metrics.iter().all(|it| it.to_bits() == metrics[0].to_bits()) {
            return Ok(metric);
        }
        Ok(metrics.iter().sum::<f64>() / metrics.len() as f64)
    }
}

impl Stateful for SchedulerInner {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        self.settled()?.state_dict()
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        self.scheduler.check_state_dict(state)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.settled()?.load_state_dict(state)
    }
}

impl Checkpointed for SchedulerInner {
    fn kind(&self) -> Kind {
        Kind::Scheduler
    }
}

stateful_handle!(
    /// Saves the schedule and its position.
    [] PreparedScheduler, inner
);

/// A schedule's step that is part of a recorded step.
struct StepSchedule(PreparedScheduler);

impl AtReplay for StepSchedule {
    fn after(&mut self) -> Result<()> {
        self.0.step()
    }
}
