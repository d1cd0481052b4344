//! An optimizer after [`Accelerator::prepare`]: the same arithmetic, behind what several batches, ranks and
//! 16 bits ask for.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use brigade_nn::NamedTensor;
use brigade_optim::{Optimizer, Trainable};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradients::accumulate::Accumulation;
use crate::gradients::loss_check::LossCheck;
use crate::model::PreparedModel;
use crate::precision::scaler::GradScaler;
use crate::prepare::Prepare;

/// An [`Optimizer`] after [`Accelerator::prepare`].
///
/// Its [`step`](PreparedOptimizer::step) and [`zero_grad`](PreparedOptimizer::zero_grad) do nothing while
/// gradients are still being accumulated; a step whose gradients come from a loss that was not finite is an
/// error, and one whose gradients of 16 bits overflowed is left out. All else is the optimizer's, which it
/// dereferences to.
pub struct PreparedOptimizer {
    optimizer: Optimizer,
    accumulation: Arc<Accumulation>,
    /// With fp16.
    scaler: Option<GradScaler>,
    loss_check: Option<Arc<LossCheck>>,
    /// What the check said when the gradients were last cleared.
    cleared: u64,
    /// What a checkpoint holds, for as long as it is there.
    _saved: Arc<SavedOptimizer>,
}

/// The handle through which checkpoints and loss checks reach an optimizer, for as long as the program has
/// it.
pub(crate) struct SavedOptimizer(pub(crate) Optimizer);

impl PreparedOptimizer {
    /// Changes every parameter that has a gradient, once the window of accumulation ends. With fp16 a step
    /// whose gradients overflowed is left out.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`crate::Error::LossNotFinite`], on every rank, with the weights as they
    /// were, when the gradients are those of a loss that was not finite and [`Accelerator::backward`] has
    /// not said so, or not been listened to (see [`crate::AcceleratorBuilder::check_loss`]).
    pub fn step(&mut self) -> Result<()> {
        if !self.accumulation.sync() {
            return Ok(());
        }
        self.losses_admit()?;
        if self.scaler_admits()? {
            self.optimizer.step()?;
        }
        Ok(())
    }

    /// Makes all gradients undefined, as PyTorch's `zero_grad(set_to_none=True)`, once the window of
    /// accumulation ends.
    ///
    /// # Errors
    /// As [`Optimizer::zero_grad`].
    pub fn zero_grad(&mut self) -> Result<()> {
        if !self.accumulation.sync() {
            return Ok(());
        }
        self.optimizer.zero_grad()?;
        if let Some(scaler) = &self.scaler {
            self.optimizer.with_parameters(|parameters| scaler.forget(parameters));
        }
        if let Some(check) = &self.loss_check {
            self.cleared = check.clear();
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
        let Some(check) = &self.loss_check else {
            return Ok(());
        };
        let step = self.optimizer.steps() + 1;
        let outcome = check.before_step(self.cleared, step, || Ok(self.optimizer.gradients()?));
        // A program that leaves the batch out leaves the schedule where it is.
        self.accumulation.set_skipped(matches!(outcome, Err(Error::LossNotFinite { .. })));
        outcome
    }

    /// Divides the gradients by the loss scale; false when they have overflowed.
    fn scaler_admits(&self) -> Result<bool> {
        let Some(scaler) = &self.scaler else {
            return Ok(true);
        };
        let admits = self.optimizer.with_parameters(|parameters| scaler.admits(parameters))?;
        self.accumulation.set_skipped(scaler.skipped());
        Ok(admits)
    }
}

impl Deref for PreparedOptimizer {
    type Target = Optimizer;

    fn deref(&self) -> &Optimizer {
        &self.optimizer
    }
}

impl DerefMut for PreparedOptimizer {
    fn deref_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }
}

impl Prepare for Optimizer {
    type Prepared = PreparedOptimizer;

    fn prepare(self, accelerator: &Accelerator) -> Result<PreparedOptimizer> {
        let saved = Arc::new(SavedOptimizer(self.clone()));
        let loss_check = accelerator.loss_check.clone();
        let cleared = loss_check.as_ref().map_or(0, |check| check.register(&saved));
        accelerator.registry.register(&saved);
        Ok(PreparedOptimizer {
            optimizer: self,
            accumulation: Arc::clone(&accelerator.accumulation),
            scaler: accelerator.grad_scaler().cloned(),
            loss_check,
            cleared,
            _saved: saved,
        })
    }
}

impl<M> Trainable for PreparedModel<M> {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        self.inner().trainable_parameters()
    }
}

impl fmt::Debug for PreparedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.optimizer.fmt(f)
    }
}
