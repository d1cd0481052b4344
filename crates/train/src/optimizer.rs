//! An optimizer after [`Accelerator::prepare`]: the same arithmetic, behind the gates of accumulation, loss
//! check and loss scale.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use brigade_nn::NamedTensor;
use brigade_optim::{Optimizer, Trainable};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::loss_check::LossCheck;
use crate::model::PreparedModel;
use crate::precision::scaler::GradScaler;
use crate::prepare::Prepare;
use crate::registry::Saved;

/// An [`Optimizer`] after [`Accelerator::prepare`].
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
    loss_check: Option<Arc<LossCheck>>,
    /// The check's count when the gradients were last cleared.
    cleared: u64,
    /// What a checkpoint holds, for as long as it is there.
    _saved: Arc<Saved<Optimizer>>,
}

impl PreparedOptimizer {
    /// Changes every parameter that has a gradient, once the window of accumulation ends. With fp16 a step
    /// whose gradients overflowed is skipped.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`crate::Error::LossNotFinite`], on every rank, with the weights as they
    /// were, when the gradients are those of a loss that was not finite and [`Accelerator::backward`] has
    /// not returned that error, or the program has ignored it (see [`crate::AcceleratorBuilder::check_loss`]).
    pub fn step(&mut self) -> Result<()> {
        if !self.accumulator.sync_gradients() {
            return Ok(());
        }
        self.losses_admit()?;
        let Some(scaler) = &self.scaler else {
            return Ok(self.optimizer.step()?);
        };
        let stepped = scaler.step(&mut self.optimizer);
        self.accumulator.set_skipped(scaler.skipped());
        stepped.map(drop)
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
        self.accumulator.set_skipped(matches!(outcome, Err(Error::LossNotFinite { .. })));
        outcome
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
        let saved = Arc::new(Saved(self.clone()));
        let loss_check = accelerator.loss_check.clone();
        let cleared = loss_check.as_ref().map_or(0, |check| check.register(&saved));
        accelerator.checkpoints.registry().register(&saved);
        Ok(PreparedOptimizer {
            optimizer: self,
            accumulator: accelerator.accumulator.clone(),
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
