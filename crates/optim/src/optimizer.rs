//! Optimizers: parameters in groups, their state under PyTorch's names, and one file per rule.

mod adafactor;
mod adagrad;
mod adam;
mod core;
mod group;
mod import;
mod lamb;
mod lars;
mod lookahead;
mod muon;
mod options;
mod places;
mod radam;
mod rmsprop;
mod sgd;
mod state;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brigade_models::{Model, NamedTensor};

pub(crate) use self::core::Core;
pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::Adam;
pub use group::{Group, ParameterGroup};
pub use lamb::Lamb;
pub use lars::Lars;
pub use lookahead::Lookahead;
pub use muon::{Muon, MuonRate};
pub use radam::RAdam;
pub use rmsprop::RmsProp;
pub use sgd::Sgd;
pub use state::{GroupState, OptimizerState, ParameterState, StateMismatch};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradients::accumulate::Accumulation;
use crate::gradients::loss_check::LossCheck;
use crate::model::PreparedModel;
use crate::precision::scaler::GradScaler;
use crate::prepare::Prepare;

/// Steps a model's parameters along their gradients. Made by `build` of [`Adam`], [`Sgd`] and the others.
///
/// It holds the parameters themselves and follows them to another device. After
/// [`Accelerator::prepare`] its `step` and `zero_grad` do nothing while gradients are still being
/// added up.
pub struct Optimizer {
    core: Arc<Mutex<Core>>,
    accumulation: Option<Arc<Accumulation>>,
    /// With fp16.
    scaler: Option<GradScaler>,
    loss_check: Option<Arc<LossCheck>>,
    /// What the check said when the gradients were last cleared.
    cleared: u64,
}

impl Optimizer {
    fn new(core: Core) -> Self {
        let core = Arc::new(Mutex::new(core));
        Self { core, accumulation: None, scaler: None, loss_check: None, cleared: 0 }
    }

    /// Changes every parameter that has a gradient; one without is left as it is, its state too. With
    /// fp16 a prepared optimizer leaves a step out whose gradients overflowed.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when the kernels refuse; [`crate::Error::LossNotFinite`], on every rank, with
    /// the weights as they were, when the gradients are those of a loss that was not finite and
    /// [`Accelerator::backward`] has not said so, or not been listened to (see
    /// [`crate::AcceleratorBuilder::check_loss`]).
    pub fn step(&mut self) -> Result<()> {
        if self.adding_up() {
            return Ok(());
        }
        self.losses_admit()?;
        if !self.scaler_admits()? {
            return Ok(());
        }
        self.lock().step()
    }

    /// Makes all gradients undefined, as PyTorch's `zero_grad(set_to_none=True)`.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when libtorch refuses.
    pub fn zero_grad(&mut self) -> Result<()> {
        if self.adding_up() {
            return Ok(());
        }
        let mut core = self.lock();
        core.zero_grad()?;
        if let Some(scaler) = &self.scaler {
            scaler.forget(&core.tensors());
        }
        drop(core);
        if let Some(check) = &self.loss_check {
            self.cleared = check.clear();
        }
        Ok(())
    }

    /// The learning rate of the next step, of all parameters whose group has none of its own.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.lock().lr()
    }

    /// Sets the learning rate. Groups with one of their own keep its ratio to this one.
    ///
    /// # Errors
    /// [`crate::Error::Misuse`] when it is negative or not a number.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        options::check("the learning rate", lr, 0.0..f64::INFINITY)?;
        self.lock().schedule(lr, None);
        Ok(())
    }

    /// Sets one group's learning rate; a schedule moves it in its new ratio to the others.
    ///
    /// # Errors
    /// [`crate::Error::Misuse`] when there is no such group, or the rate is negative or not a number.
    pub fn set_group_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        options::check("the learning rate", lr, 0.0..f64::INFINITY)?;
        self.lock().set_group_lr(group, lr)
    }

    /// The parameter groups as they are now.
    #[must_use]
    pub fn groups(&self) -> Vec<ParameterGroup> {
        self.lock().groups().to_vec()
    }

    /// Steps taken so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.lock().steps()
    }

    /// The state under PyTorch's names, for a checkpoint. Its tensors share the optimizer's memory;
    /// [`OptimizerState::deep_clone`] makes a snapshot.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] when libtorch refuses.
    pub fn state_dict(&self) -> Result<OptimizerState> {
        self.lock().state_dict()
    }

    /// Continues from a state that an optimizer of the same kind, with the same groups, of the same
    /// model has given.
    ///
    /// Learning rates, momenta and weight decays are taken from the state; the other numbers (betas,
    /// eps, …) must agree. Values are copied, to the parameters' device and kind.
    ///
    /// # Errors
    /// [`crate::Error::OptimizerState`] with the first difference: nothing was changed.
    pub fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        self.lock().load_state_dict(state)
    }

    /// What a checkpoint keeps.
    pub(crate) fn core(&self) -> &Arc<Mutex<Core>> {
        &self.core
    }

    /// What a schedule drives.
    pub(crate) fn numbers(&self) -> Arc<Numbers> {
        Arc::new(Numbers(Arc::clone(self.core())))
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// An error when the gradients come from a loss that was not finite.
    fn losses_admit(&self) -> Result<()> {
        let Some(check) = &self.loss_check else {
            return Ok(());
        };
        let step = self.steps() + 1;
        let gradients = || {
            let gradients = self.lock().gradients()?;
            Ok(gradients.into_iter().map(|(_, gradient)| gradient).collect())
        };
        let outcome = check.before_step(self.cleared, step, gradients);
        if let Some(accumulation) = &self.accumulation {
            // A program that leaves the batch out leaves the schedule where it is.
            accumulation.set_skipped(matches!(outcome, Err(Error::LossNotFinite { .. })));
        }
        outcome
    }

    /// Divides the gradients by the loss scale; false when they have overflowed.
    fn scaler_admits(&self) -> Result<bool> {
        let Some(scaler) = &self.scaler else {
            return Ok(true);
        };
        let admits = scaler.admits(&self.lock().tensors())?;
        if let Some(accumulation) = &self.accumulation {
            accumulation.set_skipped(scaler.skipped());
        }
        Ok(admits)
    }

    fn adding_up(&self) -> bool {
        self.accumulation.as_ref().is_some_and(|accumulation| !accumulation.sync())
    }
}

/// The numbers of an optimizer that a schedule changes.
pub(crate) struct Numbers(Arc<Mutex<Core>>);

impl Numbers {
    pub(crate) fn set(&self, lr: f64, momentum: Option<f64>) {
        lock(&self.0).schedule(lr, momentum);
    }

    pub(crate) fn lr(&self) -> f64 {
        lock(&self.0).lr()
    }
}

/// A panic elsewhere does not make the numbers wrong.
pub(crate) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Prepare for Optimizer {
    type Prepared = Self;

    fn prepare(mut self, accelerator: &Accelerator) -> Result<Self> {
        self.accumulation = Some(Arc::clone(&accelerator.accumulation));
        self.scaler = accelerator.grad_scaler().cloned();
        if let Some(check) = &accelerator.loss_check {
            self.cleared = check.register(&self.core);
            self.loss_check = Some(Arc::clone(check));
        }
        accelerator.registry.register(&self.core);
        Ok(self)
    }
}

/// Something with parameters to train: what an optimizer is built on.
pub trait Trainable {
    /// Every parameter that is not frozen, once, in the order of registration.
    fn trainable_parameters(&self) -> Vec<NamedTensor>;
}

impl<M> Trainable for Model<M> {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        Self::trainable_parameters(self)
    }
}

impl<M> Trainable for PreparedModel<M> {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        self.inner().trainable_parameters()
    }
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock().fmt(f)
    }
}
