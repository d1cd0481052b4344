//! An optimizer after [`crate::Accelerator::prepare`]: the same arithmetic, subject to accumulation, loss check and
//! loss scale.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_optim::{DeviceScalars, Optimizer, OptimizerState, ParameterGroup};
use brigade_torch::{DeviceExt, Error, ProcessGroup, Result, gradient, set_gradient};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use crate::error::loss_is_not_finite;
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::backward::Gradients;
use crate::gradients::loss_check::{CheckedOptimizer, LossCheck};
use crate::job::Job;
use crate::model_parallel::ModelParallelRanks;
use crate::parameters::Parameters;
use crate::pipeline::PipelineRanks;
use crate::precision::scaler::GradScaler;
use crate::processes::Processes;
use crate::recorder::AtReplay;
use crate::registry::{Checkpointed, Kind as ObjectKind, Registry, Worlds};
use crate::sharding::{Part, PartRegions, ShardedModels};
use crate::stateful::{Stateful, stateful_handle};

/// An [`Optimizer`] prepared by [`crate::Accelerator::prepare`].
///
/// Its [`step`](PreparedOptimizer::step) and [`zero_grad`](PreparedOptimizer::zero_grad) do nothing while
/// gradients are still being accumulated; a step whose gradients come from a loss that was not finite is an
/// error, and one whose 16-bit gradients overflowed is skipped.
///
/// On a GPU with fp16, the device decides whether a step is made, and a schedule changes the learning rate once the
/// decision is known. Methods that read or change the optimizer ([`lr`](PreparedOptimizer::lr),
/// [`groups`](PreparedOptimizer::groups), and [`settled`](PreparedOptimizer::settled) for everything else) wait for it,
/// and return its error.
///
/// Checkpoints contain its state until the program drops it and every captured step that uses it.
pub struct PreparedOptimizer {
    inner: Arc<OptimizerInner>,
}

/// State of a prepared optimizer that the program's handle, checkpoints and recorded steps share.
pub(crate) struct OptimizerInner {
    optimizer: Optimizer,
    accumulator: GradientAccumulator,
    /// Loss scaler, with fp16.
    scaler: Option<GradScaler>,
    loss_check: Option<(Arc<LossCheck>, Arc<CheckedOptimizer>)>,
    /// The groups' learning rates on a GPU.
    rates: Option<DeviceRates>,
    job: Arc<Job>,
    /// Models whose shards it may step.
    sharded: Option<Arc<ShardedModels>>,
    tensor: Option<Arc<ModelParallelRanks>>,
    pipeline: Option<Arc<PipelineRanks>>,
}

/// The groups' learning rates as a tensor on the device, so that launched or recorded kernels do not contain their
/// values.
#[derive(Debug)]
struct DeviceRates {
    device: Device,
    /// `true` if parameters of float64 are stepped with rates from the host: libtorch's fused kernels read a rate in
    /// float32 from memory, which would cost such training 8 digits.
    by_value: bool,
    /// `true` if a momentum or a weight decay has changed since a step was recorded with its value.
    others_change: AtomicBool,
    tensor: Mutex<Option<Tensor>>,
    /// Learning rates that the tensor contains.
    uploaded: Mutex<Vec<f64>>,
}

impl DeviceRates {
    /// Writes the rates that have changed since the last call.
    fn upload(&self, optimizer: &Optimizer) -> Result<()> {
        if self.by_value {
            return Ok(());
        }
        let rates: Vec<f64> = optimizer.groups().iter().map(ParameterGroup::lr).collect();
        let mut tensor = self.tensor.lock();
        let mut uploaded = self.uploaded.lock();
        if tensor.is_none() || uploaded.len() != rates.len() {
            *tensor = Some(Tensor::f_zeros([rates.len() as i64], (Kind::Float, self.device))?);
            *uploaded = vec![0.0; rates.len()];
        }
        let Some(tensor) = &*tensor else { return Ok(()) };
        for (group, (&rate, uploaded)) in rates.iter().zip(uploaded.iter_mut()).enumerate() {
            if rate.to_bits() != uploaded.to_bits() {
                // A kernel with the value among its arguments: a copy from the host would have to wait.
                let _ = tensor.f_select(0, group as i64)?.f_fill_(rate)?;
                *uploaded = rate;
            }
        }
        Ok(())
    }

    fn tensor(&self) -> Result<Tensor> {
        let tensor = self.tensor.lock();
        tensor.as_ref().map(Tensor::shallow_clone).ok_or_else(|| {
            Error::invalid_argument(
                "an optimizer's first step cannot be recorded: its states are made by it; step it once before",
            )
        })
    }

    /// Returns `true` if the kernels of a step read learning rates and overflows only from tensors on the device.
    fn suffice(&self) -> bool {
        !self.by_value && !self.others_change.load(Ordering::Relaxed)
    }

    /// Steps with the rates that were uploaded last.
    fn step(&self, optimizer: &Optimizer, found: Option<&Tensor>) -> Result<()> {
        let lr = if self.by_value { None } else { Some(self.tensor()?) };
        let scalars = DeviceScalars { lr: lr.as_ref(), grad_scale: None, found_inf: found };
        optimizer.clone().step_with(&scalars)
    }
}

/// An optimizer's step that is part of a recorded step.
struct RecordedStep {
    inner: Arc<OptimizerInner>,
    /// Momenta and weight decays as recorded by value.
    recorded: Vec<u64>,
}

impl AtReplay for RecordedStep {
    fn before(&mut self) -> Result<()> {
        self.inner.accumulator.settle()?;
        self.inner.rates.iter().try_for_each(|rates| rates.upload(&self.inner.optimizer))
    }

    fn after(&mut self) -> Result<()> {
        self.inner.optimizer.clone().count_launched(1);
        self.inner.decide_later();
        Ok(())
    }

    fn is_stale(&mut self) -> bool {
        let stale = by_value(&self.inner.optimizer) != self.recorded;
        if let (true, Some(rates)) = (stale, &self.inner.rates) {
            rates.others_change.store(true, Ordering::Relaxed);
        }
        stale
    }
}

/// Returns the numbers of each group that kernels get by value even if its learning rate is on the device.
fn by_value(optimizer: &Optimizer) -> Vec<u64> {
    let groups = optimizer.groups();
    groups.iter().flat_map(|it| [it.momentum(), it.weight_decay()]).map(f64::to_bits).collect()
}

/// An optimizer's step between two recorded parts of a step: kernels that get numbers by value are launched again at
/// each replay.
struct StepBetween {
    inner: Arc<OptimizerInner>,
    /// Parameters with the gradients of this recording: the parameters' current gradients may belong to another one.
    gradients: Vec<(Tensor, Tensor)>,
    /// Overflow flag of the gradients, written by the recording.
    found: Option<Tensor>,
}

impl AtReplay for StepBetween {
    fn before(&mut self) -> Result<()> {
        self.inner.accumulator.settle()
    }

    fn between(&mut self) -> Result<()> {
        for (parameter, gradient) in &self.gradients {
            set_gradient(parameter, gradient)?;
        }
        let optimizer = &self.inner.optimizer;
        let stepped = match &self.inner.rates {
            Some(rates) => {
                rates.upload(optimizer)?;
                rates.step(optimizer, self.found.as_ref())
            }
            None => optimizer.clone().step(),
        };
        self.inner.job.explain_memory("the optimizer's step", stepped)
    }

    fn after(&mut self) -> Result<()> {
        self.inner.decide_later();
        Ok(())
    }
}

impl PreparedOptimizer {
    /// Prepares an optimizer, and registers it for checkpoints.
    pub(crate) fn new(
        optimizer: Optimizer,
        gradients: &Gradients,
        registry: &Registry,
    ) -> Result<Self> {
        if let Some(sharded) = &gradients.sharded {
            sharded.take_over(&optimizer)?;
        }
        if let Some(tensor) = &gradients.tensor {
            tensor.check_optimizer(&optimizer)?;
        }
        let loss_check = gradients.loss_check.as_ref();
        let loss_check =
            loss_check.map(|check| (Arc::clone(check), check.watch_optimizer(&optimizer)));
        let job = &gradients.processes.job;
        // A custom rule that does not take numbers from the device is stepped with the host's.
        let on_device = job.device.device_kind().is_some() && optimizer.takes_device_scalars();
        let rates = on_device.then(|| DeviceRates {
            device: job.device,
            by_value: optimizer.with_parameters(|parameters| {
                let mut kinds = parameters.iter().map(|parameter| parameter.f_kind());
                kinds.any(|kind| kind.is_ok_and(|kind| kind == Kind::Double))
            }),
            others_change: AtomicBool::new(false),
            tensor: Mutex::default(),
            uploaded: Mutex::default(),
        });
        let inner = Arc::new(OptimizerInner {
            optimizer,
            accumulator: gradients.accumulator.clone(),
            scaler: gradients.scaler.clone(),
            loss_check,
            rates,
            job: Arc::clone(job),
            sharded: gradients.sharded.clone(),
            tensor: gradients.tensor.clone(),
            pipeline: gradients.pipeline.clone(),
        });
        registry.register(&inner);
        Ok(Self { inner })
    }

    /// Returns all ranks of the job, those included that have other parts or stages.
    pub(crate) fn everyone(&self) -> Processes {
        match (&self.inner.pipeline, &self.inner.tensor) {
            (Some(pipeline), _) => pipeline.everyone().clone(),
            (None, Some(tensor)) => tensor.everyone().clone(),
            (None, None) => Processes::of(Arc::clone(&self.inner.job)),
        }
    }

    /// Returns the ranks with stages of models, if there are some.
    pub(crate) fn pipeline(&self) -> Option<&PipelineRanks> {
        self.inner.pipeline.as_deref()
    }

    /// Returns the names of the parameters that the optimizer steps.
    pub(crate) fn parameter_names(&self) -> Result<HashSet<String>> {
        let state = self.inner.settled()?.state_dict()?;
        Ok(state.parameters.into_iter().map(|parameter| parameter.name).collect())
    }

    /// Returns the ranks that have the other parts of this rank's tensors.
    pub(crate) fn regions(&self) -> PartRegions {
        self.inner.tensor.as_ref().map(|it| it.regions()).unwrap_or_default()
    }

    /// Returns the parts that this rank has of the tensors of the optimizer's state, by their places in it.
    pub(crate) fn parts(&self) -> HashMap<String, Part> {
        Checkpointed::parts(&*self.inner)
    }

    /// Returns the ranks that share one copy of the parameters. `None` if the optimizer steps no shards.
    pub(crate) fn gather_group(&self) -> Option<ProcessGroup> {
        self.inner.sharded.as_ref()?.group_of(&self.inner.optimizer)
    }

    /// Updates every parameter that has a gradient, at the end of the accumulation window. With fp16 a step whose
    /// gradients overflowed is skipped.
    ///
    /// # Errors
    /// Returns the same errors as [`Optimizer::step`]. Returns [`crate::TrainError::LossNotFinite`] on every rank, with
    /// the weights unchanged, if the gradients are those of a loss that was not finite, and
    /// [`crate::Accelerator::backward`] has not returned this error or the program has ignored it (see
    /// [`crate::AcceleratorBuilder::check_loss`]).
    pub fn step(&mut self) -> Result<()> {
        self.inner.step()
    }

    /// Sets all gradients to undefined, as PyTorch's `zero_grad(set_to_none=True)` does, at the end of the accumulation
    /// window.
    ///
    /// # Errors
    /// Returns the same errors as [`Optimizer::zero_grad`].
    pub fn zero_grad(&mut self) -> Result<()> {
        self.inner.zero_grad()
    }

    /// Returns a handle of the optimizer itself, for operations that this type has no method for. Waits until the last
    /// step is complete: the device has reported whether the step was made, and schedules have been updated.
    ///
    /// ```
    /// use brigade_optim::Adam;
    /// use brigade_train::Accelerator;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let optimizer = accelerator.prepare(Adam::default().build(&model)?)?;
    /// optimizer.settled()?.set_group_weight_decay(0, 0.1)?;
    /// assert_eq!(optimizer.groups()?[0].weight_decay(), 0.1);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when the device has failed. Also returns the errors of a schedule that is
    /// stepped.
    pub fn settled(&self) -> Result<Optimizer> {
        self.inner.settled().cloned()
    }

    /// Returns the learning rate of the next step, as [`Optimizer::lr`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedOptimizer::settled`].
    pub fn lr(&self) -> Result<f64> {
        Ok(self.inner.settled()?.lr())
    }

    /// Sets the learning rate, as [`Optimizer::set_lr`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedOptimizer::settled`] and [`Optimizer::set_lr`].
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.settled()?.set_lr(lr)
    }

    /// Returns the current parameter groups.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedOptimizer::settled`].
    pub fn groups(&self) -> Result<Vec<ParameterGroup>> {
        Ok(self.inner.settled()?.groups())
    }

    /// Returns the number of steps made so far, without skipped ones.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedOptimizer::settled`].
    pub fn steps(&self) -> Result<u64> {
        Ok(self.inner.settled()?.steps())
    }

    /// Returns the optimizer itself, no longer prepared, and no longer in checkpoints.
    #[must_use]
    pub fn into_inner(self) -> Optimizer {
        self.inner.optimizer.clone()
    }
}

impl OptimizerInner {
    fn settled(&self) -> Result<&Optimizer> {
        self.accumulator.settle()?;
        Ok(&self.optimizer)
    }

    /// Records that the device decides whether the step is made.
    fn decide_later(&self) {
        if let Some(scaler) = &self.scaler {
            self.accumulator.set_skipped_later(scaler);
        }
    }

    fn step(self: &Arc<Self>) -> Result<()> {
        if !self.accumulator.sync_gradients() {
            return Ok(());
        }
        if let Some(tensor) = self.tensor.as_ref().filter(|_| self.job.debug) {
            tensor.compare_gradients(&self.optimizer)?;
        }
        let outcome = self.step_now();
        if let Some(sharded) = &self.sharded {
            // Also after a step that failed: some shards may have changed.
            sharded.stepped(&self.optimizer)?;
        }
        outcome?;
        let device = self.job.device;
        if device.has_streams() {
            return Ok(());
        }
        // Operations may be computed later than they are called, and so fail later: at the latest with their step.
        let complete = device.synchronize();
        self.job.explain_memory("the optimizer's step", complete)
    }

    fn step_now(self: &Arc<Self>) -> Result<()> {
        // A sharded model that was prepared later may require a rule that takes no numbers from the device.
        let rates = self.rates.as_ref().filter(|_| self.optimizer.takes_device_scalars());
        if let Some(rates) = rates {
            return self.step_on_device(rates);
        }
        self.losses_admit()?;
        if self.job.recorder.is_recording() {
            return self.step_between(None);
        }
        let mut optimizer = self.optimizer.clone();
        let Some(scaler) = &self.scaler else {
            return optimizer.step();
        };
        let stepped = scaler.step(&mut optimizer);
        // A device that keeps the scale has reported the result of the last step by now.
        self.accumulator.set_skipped(scaler.settle()?);
        stepped.map(drop)
    }

    /// Steps with learning rates and overflows on the device, so that the host waits only for the results of earlier
    /// steps.
    fn step_on_device(self: &Arc<Self>, rates: &DeviceRates) -> Result<()> {
        let recording = self.job.recorder.is_recording();
        if !recording {
            // Schedules that had to wait for the last step come first.
            self.accumulator.settle()?;
        }
        self.losses_admit()?;
        if !recording {
            rates.upload(&self.optimizer)?;
        }
        let found = match &self.scaler {
            Some(scaler) => Some(self.optimizer.with_parameters(|it| scaler.found_on_device(it))?),
            None => None,
        };
        if recording && !rates.suffice() {
            return self.step_between(found);
        }
        let stepped = rates.step(&self.optimizer, found.as_ref());
        self.job.explain_memory("the optimizer's step", stepped)?;
        if recording {
            // The step was recorded, not executed.
            self.optimizer.clone().count_launched(-1);
            let recorded = by_value(&self.optimizer);
            self.job.recorder.at_each_replay(RecordedStep { inner: Arc::clone(self), recorded });
        } else {
            self.decide_later();
        }
        Ok(())
    }

    /// Ends the recording and begins another one, with this step between the two.
    fn step_between(self: &Arc<Self>, found: Option<Tensor>) -> Result<()> {
        if self.rates.is_none() && self.scaler.is_some() {
            return Err(Error::invalid_argument(
                "with fp16, the step of a rule that takes no numbers from the device waits for the overflow of \
                 its gradients",
            ));
        }
        let gradients = self.optimizer.with_parameters(|parameters| -> Result<Vec<_>> {
            let own = |parameter: &&Tensor| {
                let pair = |gradient| (parameter.shallow_clone(), gradient);
                gradient(parameter).map(|found| found.map(pair)).transpose()
            };
            parameters.iter().filter_map(own).collect::<Result<_, _>>()
        })?;
        self.job.recorder.cut(StepBetween { inner: Arc::clone(self), gradients, found })
    }

    fn zero_grad(&self) -> Result<()> {
        if !self.accumulator.sync_gradients() {
            return Ok(());
        }
        self.optimizer.clone().zero_grad()?;
        if let Some(sharded) = &self.sharded {
            sharded.cleared(&self.optimizer)?;
        }
        if let Some(scaler) = &self.scaler {
            self.optimizer.with_parameters(|parameters| scaler.forget(parameters));
        }
        if let Some((check, watched)) = &self.loss_check {
            check.clear(watched);
        }
        Ok(())
    }

    /// Fails if the gradients come from a loss that was not finite.
    fn losses_admit(&self) -> Result<()> {
        let Some((check, watched)) = &self.loss_check else {
            return Ok(());
        };
        let outcome = check.before_step(watched);
        // A program that skips the batch does not advance the schedule.
        self.accumulator.set_skipped(loss_is_not_finite(&outcome));
        outcome
    }
}

impl Stateful for OptimizerInner {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        Stateful::state_dict(self.settled()?)
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        self.optimizer.check_state_dict(state)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        Stateful::load_state_dict(self.settled()?, state)
    }
}

impl Checkpointed for OptimizerInner {
    fn kind(&self) -> ObjectKind {
        ObjectKind::Optimizer
    }

    /// Takes over the tensors without a copy, since they were read for this load.
    fn restore(&self, state: &Value<Tensor>, _worlds: &Worlds) -> Result<()> {
        let state = OptimizerState::from_value(state, Tensor::shallow_clone)
            .map_err(Error::invalid_argument)?;
        self.settled()?.clone().adopt_state(state)
    }

    fn optimizer(&self) -> Option<Optimizer> {
        Some(self.optimizer.clone())
    }

    fn parts(&self) -> HashMap<String, Part> {
        match (&self.sharded, &self.tensor) {
            (Some(sharded), _) => sharded.parts_of(&self.optimizer),
            (None, Some(tensor)) => tensor.parts_of(&self.optimizer),
            (None, None) => HashMap::new(),
        }
    }
}

stateful_handle!(
    /// Saves the optimizer's state under PyTorch's names.
    [] PreparedOptimizer, inner
);

/// Calls `f` with the parameters that the optimizer steps.
impl Parameters for PreparedOptimizer {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.inner.optimizer.each(f);
    }
}

impl fmt::Debug for PreparedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.optimizer.fmt(f)
    }
}
