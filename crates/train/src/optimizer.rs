//! An optimizer after [`crate::Accelerator::prepare`]: the same arithmetic, behind the gates of accumulation, loss
//! check and loss scale.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use brigade_optim::{DeviceScalars, Optimizer, ParameterGroup};
use brigade_torch::{Device, DeviceExt, Kind, Tensor, gradient, set_gradient};

use crate::error::{Error, Result};
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::backward::Gradients;
use crate::gradients::loss_check::{CheckedOptimizer, LossCheck};
use crate::job::Job;
use crate::precision::scaler::GradScaler;
use crate::recorder::AtReplay;
use crate::registry::{Registry, Saved};

/// An [`Optimizer`] after [`crate::Accelerator::prepare`].
///
/// Its [`step`](PreparedOptimizer::step) and [`zero_grad`](PreparedOptimizer::zero_grad) do nothing while
/// gradients are still being accumulated; a step whose gradients come from a loss that was not finite is an
/// error, and one whose 16-bit gradients overflowed is skipped. All else is the optimizer's, which it
/// dereferences to.
pub struct PreparedOptimizer {
    optimizer: Optimizer,
    accumulator: GradientAccumulator,
    /// With fp16.
    scaler: Option<GradScaler>,
    loss_check: Option<(Arc<LossCheck>, Arc<CheckedOptimizer>)>,
    /// The groups' learning rates on a GPU.
    rates: Option<Arc<DeviceRates>>,
    job: Arc<Job>,
    /// What a checkpoint holds, for as long as it is there.
    _saved: Arc<Saved<Optimizer>>,
}

/// The groups' learning rates as a tensor on the device: what is launched, or recorded, holds none of their values.
#[derive(Debug)]
struct DeviceRates {
    device: Device,
    /// Parameters of float64 are stepped with rates of the host: libtorch's fused kernels read a rate in float32 from
    /// memory, which costs such training 8 of its digits.
    by_value: bool,
    /// Whether a momentum or a weight decay has changed since a step was recorded with it by value.
    others_change: AtomicBool,
    tensor: Mutex<Option<Tensor>>,
    /// What the tensor holds.
    uploaded: Mutex<Vec<f64>>,
}

impl DeviceRates {
    /// Writes the rates that have changed since the last time.
    fn upload(&self, optimizer: &Optimizer) -> Result<()> {
        if self.by_value {
            return Ok(());
        }
        let rates: Vec<f64> = optimizer.groups().iter().map(ParameterGroup::lr).collect();
        let mut tensor = self.tensor.lock().unwrap_or_else(PoisonError::into_inner);
        let mut uploaded = self.uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        if tensor.is_none() || uploaded.len() != rates.len() {
            *tensor = Some(Tensor::f_zeros([rates.len() as i64], (Kind::Float, self.device))?);
            *uploaded = vec![0.0; rates.len()];
        }
        let Some(tensor) = &*tensor else { return Ok(()) };
        for (group, (&rate, uploaded)) in rates.iter().zip(uploaded.iter_mut()).enumerate() {
            if rate.to_bits() != uploaded.to_bits() {
                // A kernel with the value among its arguments: no copy from the host, which would have to wait.
                let _ = tensor.f_select(0, group as i64)?.f_fill_(rate)?;
                *uploaded = rate;
            }
        }
        Ok(())
    }

    fn tensor(&self) -> Result<Tensor> {
        let tensor = self.tensor.lock().unwrap_or_else(PoisonError::into_inner);
        tensor.as_ref().map(Tensor::shallow_clone).ok_or_else(|| {
            Error::InvalidArgument(
                "an optimizer's first step cannot be recorded: its states are made by it; step it once before"
                    .into(),
            )
        })
    }

    /// Whether what a step launches depends on the learning rates and overflows on the device alone.
    fn suffice(&self) -> bool {
        !self.by_value && !self.others_change.load(Ordering::Relaxed)
    }

    /// Steps with the rates that were uploaded last.
    fn step(&self, optimizer: &mut Optimizer, found: Option<&Tensor>) -> Result<()> {
        let lr = if self.by_value { None } else { Some(self.tensor()?) };
        let scalars = DeviceScalars { lr: lr.as_ref(), grad_scale: None, found_inf: found };
        Ok(optimizer.step_with(&scalars)?)
    }
}

/// An optimizer's step within a recorded step.
struct RecordedStep {
    optimizer: Optimizer,
    accumulator: GradientAccumulator,
    rates: Arc<DeviceRates>,
    scaler: Option<GradScaler>,
    /// The momenta and weight decays, which the step has by value.
    recorded: Vec<u64>,
}

impl AtReplay for RecordedStep {
    fn before(&mut self) -> Result<()> {
        self.accumulator.settle()?;
        self.rates.upload(&self.optimizer)
    }

    fn after(&mut self) -> Result<()> {
        self.optimizer.count_launched(1);
        if let Some(scaler) = &self.scaler {
            self.accumulator.set_skipped_later(scaler);
        }
        Ok(())
    }

    fn is_stale(&mut self) -> bool {
        let stale = by_value(&self.optimizer) != self.recorded;
        if stale {
            self.rates.others_change.store(true, Ordering::Relaxed);
        }
        stale
    }
}

/// The numbers of each group that kernels get by value where its learning rate is on the device.
fn by_value(optimizer: &Optimizer) -> Vec<u64> {
    let groups = optimizer.groups();
    groups.iter().flat_map(|it| [it.momentum(), it.weight_decay()]).map(f64::to_bits).collect()
}

/// An optimizer's step between two recorded parts of a step: kernels that get numbers by value are launched anew.
struct StepBetween {
    optimizer: Optimizer,
    /// The parameters and their gradients in the recording: those of the parameters may be of another one.
    gradients: Vec<(Tensor, Tensor)>,
    accumulator: GradientAccumulator,
    rates: Option<Arc<DeviceRates>>,
    scaler: Option<GradScaler>,
    /// Where the recording says whether a gradient has overflowed.
    found: Option<Tensor>,
    job: Arc<Job>,
}

impl AtReplay for StepBetween {
    fn before(&mut self) -> Result<()> {
        self.accumulator.settle()
    }

    fn between(&mut self) -> Result<()> {
        for (parameter, gradient) in &self.gradients {
            set_gradient(parameter, gradient)?;
        }
        let stepped = match &self.rates {
            Some(rates) => {
                rates.upload(&self.optimizer)?;
                rates.step(&mut self.optimizer, self.found.as_ref())
            }
            None => self.optimizer.step().map_err(Error::from),
        };
        self.job.explain_memory("the optimizer's step", stepped)
    }

    fn after(&mut self) -> Result<()> {
        if let Some(scaler) = &self.scaler {
            self.accumulator.set_skipped_later(scaler);
        }
        Ok(())
    }
}

impl PreparedOptimizer {
    /// Prepares an optimizer, and registers what a checkpoint holds of it.
    pub(crate) fn new(optimizer: Optimizer, gradients: &Gradients, registry: &Registry) -> Self {
        let saved = Arc::new(Saved(optimizer.clone()));
        let loss_check = gradients.loss_check.as_ref();
        let loss_check = loss_check.map(|it| (Arc::clone(it), it.watch_optimizer(&optimizer)));
        registry.register(&saved);
        let job = &gradients.processes.job;
        // A rule of the program's that does not take them is stepped with numbers of the host.
        let on_device = job.device.device_kind().is_some() && optimizer.takes_device_scalars();
        let rates = on_device.then(|| DeviceRates {
            device: job.device,
            by_value: optimizer.with_parameters(|all| {
                all.iter().any(|it| it.f_kind().is_ok_and(|kind| kind == Kind::Double))
            }),
            others_change: AtomicBool::new(false),
            tensor: Mutex::default(),
            uploaded: Mutex::default(),
        });
        Self {
            optimizer,
            accumulator: gradients.accumulator.clone(),
            scaler: gradients.scaler.clone(),
            loss_check,
            rates: rates.map(Arc::new),
            job: Arc::clone(job),
            _saved: saved,
        }
    }

    /// Changes every parameter that has a gradient, once the window of accumulation ends. With fp16 a step
    /// whose gradients overflowed is skipped.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`crate::Error::LossNotFinite`], on every rank, with the weights as they
    /// were, when the gradients are those of a loss that was not finite and [`crate::Accelerator::backward`] has
    /// not returned that error, or the program has ignored it (see [`crate::AcceleratorBuilder::check_loss`]).
    pub fn step(&mut self) -> Result<()> {
        if !self.accumulator.sync_gradients() {
            return Ok(());
        }
        if self.rates.is_some() {
            return self.step_on_device();
        }
        self.losses_admit()?;
        if self.job.recorder.is_recording() {
            return self.step_between(None, None);
        }
        let Some(scaler) = &self.scaler else {
            return Ok(self.optimizer.step()?);
        };
        let stepped = scaler.step(&mut self.optimizer);
        self.accumulator.set_skipped(scaler.skipped());
        stepped.map(drop)
    }

    /// Steps with learning rates and overflows that are on the device, so that the host waits for nothing but the
    /// results of earlier steps.
    fn step_on_device(&mut self) -> Result<()> {
        let recording = self.job.recorder.is_recording();
        if !recording {
            // Schedules that had to wait for the last step come first.
            self.accumulator.settle()?;
        }
        self.losses_admit()?;
        let Some(rates) = self.rates.clone() else { return Ok(()) };
        if !recording {
            rates.upload(&self.optimizer)?;
        }
        let found = match &self.scaler {
            Some(scaler) => Some(self.optimizer.with_parameters(|it| scaler.found_on_device(it))?),
            None => None,
        };
        if recording && !rates.suffice() {
            return self.step_between(Some(rates), found);
        }
        let stepped = rates.step(&mut self.optimizer, found.as_ref());
        self.job.explain_memory("the optimizer's step", stepped)?;
        if recording {
            // It was recorded and not made.
            self.optimizer.count_launched(-1);
            self.job.recorder.at_each_replay(RecordedStep {
                recorded: by_value(&self.optimizer),
                optimizer: self.optimizer.clone(),
                accumulator: self.accumulator.clone(),
                rates,
                scaler: self.scaler.clone(),
            });
        } else if let Some(scaler) = &self.scaler {
            self.accumulator.set_skipped_later(scaler);
        }
        Ok(())
    }

    /// Cuts the recording in two, with this step between them.
    fn step_between(&self, rates: Option<Arc<DeviceRates>>, found: Option<Tensor>) -> Result<()> {
        if rates.is_none() && self.scaler.is_some() {
            return Err(Error::InvalidArgument(
                "with fp16, the step of a rule that takes no numbers from the device waits for the overflow of \
                 its gradients"
                    .into(),
            ));
        }
        let gradients = self.optimizer.with_parameters(|parameters| -> Result<Vec<_>> {
            let own = |parameter: &&Tensor| {
                let pair = |gradient| (parameter.shallow_clone(), gradient);
                gradient(parameter).map(|found| found.map(pair)).transpose()
            };
            Ok(parameters.iter().filter_map(own).collect::<Result<_, _>>()?)
        })?;
        self.job.recorder.cut(StepBetween {
            optimizer: self.optimizer.clone(),
            gradients,
            accumulator: self.accumulator.clone(),
            rates,
            scaler: self.scaler.clone(),
            found,
            job: Arc::clone(&self.job),
        })
    }

    /// Makes all gradients undefined, as PyTorch's `zero_grad(set_to_none=True)`, once the window of
    /// accumulation ends.
    ///
    /// # Errors
    /// As [`Optimizer::zero_grad`].
    pub fn zero_grad(&mut self) -> Result<()> {
        if !self.accumulator.sync_gradients() {
            return Ok(());
        }
        self.optimizer.zero_grad()?;
        if let Some(scaler) = &self.scaler {
            self.optimizer.with_parameters(|parameters| scaler.forget(parameters));
        }
        if let Some((check, watched)) = &self.loss_check {
            check.clear(watched);
        }
        Ok(())
    }

    /// Returns the optimizer itself, no longer prepared.
    #[must_use]
    pub fn into_inner(self) -> Optimizer {
        self.optimizer
    }

    /// An error when the gradients come from a loss that was not finite.
    fn losses_admit(&self) -> Result<()> {
        let Some((check, watched)) = &self.loss_check else {
            return Ok(());
        };
        let outcome = check.before_step(watched);
        // A program that leaves the batch out leaves the schedule where it is.
        self.accumulator.set_skipped(matches!(outcome, Err(Error::LossNotFinite { .. })));
        outcome
    }
}

impl Deref for PreparedOptimizer {
    type Target = Optimizer;

    /// Where a device has to say whether the last step was made, this waits for it.
    fn deref(&self) -> &Optimizer {
        let _ = self.accumulator.settle();
        &self.optimizer
    }
}

impl DerefMut for PreparedOptimizer {
    fn deref_mut(&mut self) -> &mut Optimizer {
        let _ = self.accumulator.settle();
        &mut self.optimizer
    }
}

impl fmt::Debug for PreparedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.optimizer.fmt(f)
    }
}
