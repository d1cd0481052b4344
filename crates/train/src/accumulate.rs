//! Backward, and gradients that are added up over several batches.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use brigade_data::Batch;
use brigade_torch::{Tensor, gradient};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::model::PreparedModels;

/// Where the loop stands in its window of batches.
#[derive(Debug)]
pub(crate) struct Accumulation {
    /// Batches of a full window.
    steps: usize,
    /// Batches of this window so far.
    position: AtomicUsize,
    /// What the current batch's loss is divided by: the batches of its window.
    divisor: AtomicUsize,
    /// Whether the current batch ends its window: gradients are reduced and optimizers step.
    sync: AtomicBool,
}

impl Accumulation {
    pub(crate) fn new(steps: usize) -> Result<Self> {
        if steps == 0 {
            return Err(Error::Misuse(
                "gradient_accumulation_steps is 0; 1 steps the optimizer after every batch".into(),
            ));
        }
        Ok(Self {
            steps,
            position: AtomicUsize::new(0),
            divisor: AtomicUsize::new(steps),
            sync: AtomicBool::new(true),
        })
    }

    /// Batches of this window so far.
    pub(crate) fn position(&self) -> usize {
        self.position.load(Ordering::Relaxed)
    }

    /// Goes on within a window, from a checkpoint.
    pub(crate) fn set_position(&self, position: usize) {
        self.position.store(position, Ordering::Relaxed);
        self.sync.store(true, Ordering::Relaxed);
    }

    /// Batches of a full window.
    pub(crate) fn steps(&self) -> usize {
        self.steps
    }

    pub(crate) fn sync(&self) -> bool {
        self.sync.load(Ordering::Relaxed)
    }
}

impl Accelerator {
    /// Batches of a full accumulation window.
    #[must_use]
    pub fn gradient_accumulation_steps(&self) -> usize {
        self.accumulation.steps
    }

    /// Whether the current batch ends its window: its backward reduces gradients, and prepared
    /// optimizers and schedulers step.
    #[must_use]
    pub fn sync_gradients(&self) -> bool {
        self.accumulation.sync()
    }

    /// The gradients of `loss`, added to those that are there. When the current batch ends its window,
    /// they are averaged over the ranks.
    ///
    /// The loss is divided by the number of batches in the window, the real number where the data end
    /// before the window does: the result is the gradient of the mean over the whole window.
    ///
    /// # Errors
    /// [`Error::Torch`] when a peer is gone; [`Error::Tensor`] when the loss has no graph or is no
    /// single number.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        let divisor = self.accumulation.divisor.load(Ordering::Relaxed);
        let outcome = match divisor {
            1 => loss.f_backward(),
            divisor => loss.f_div_scalar(divisor as f64)?.f_backward(),
        };
        outcome.map_err(|error| match self.group() {
            Some(group) => Error::Torch(group.backward_failure(error)),
            None => Error::Tensor(error),
        })
    }

    /// Runs the body for one batch of an accumulation window. The model's forward, the backward, the
    /// optimizer's and scheduler's `step` and `zero_grad` all go inside; whether they do something is
    /// decided here.
    ///
    /// The last batch of the data ends the window, however short it is.
    ///
    /// ```no_run
    /// # use brigade_train::{Accelerator, Optimizer, PreparedModel, PreparedLoader, Result};
    /// # use brigade_models::Cnn;
    /// # use brigade_data::LabelledImages;
    /// # fn f(accelerator: &Accelerator, model: &PreparedModel<Cnn>, optimizer: &mut Optimizer,
    /// #      train: &PreparedLoader<brigade_data::DataLoader<LabelledImages>>) -> Result<()> {
    /// for batch in train {
    ///     let batch = batch?;
    ///     let (images, labels) = &*batch;
    ///     accelerator.accumulate(model, &batch, || {
    ///         let loss = model.forward(images)?.cross_entropy_for_logits(labels);
    ///         accelerator.backward(&loss)?;
    ///         optimizer.step()?;
    ///         optimizer.zero_grad()
    ///     })?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The body's.
    pub fn accumulate<B, R>(
        &self,
        models: &(impl PreparedModels + ?Sized),
        batch: &Batch<B>,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let state = &self.accumulation;
        let length = state.position.load(Ordering::Relaxed) + 1;
        let sync = batch.is_last() || length >= state.steps;
        state.sync.store(sync, Ordering::Relaxed);
        if !sync {
            state.position.store(length, Ordering::Relaxed);
            return self.no_sync(models, body);
        }
        state.position.store(0, Ordering::Relaxed);
        if length == state.steps {
            return body();
        }
        // The data end before the window does. What has been added up was divided by the length of a
        // full window: bring it to this one's before the last gradients come.
        rescale(models, state.steps as f64 / length as f64)?;
        state.divisor.store(length, Ordering::Relaxed);
        let outcome = body();
        state.divisor.store(state.steps, Ordering::Relaxed);
        outcome
    }

    /// Runs the body without averaging gradients over the ranks: forward and backward must both be
    /// inside. Gradients add up on each rank until a backward outside.
    ///
    /// # Errors
    /// The body's.
    pub fn no_sync<R>(
        &self,
        models: &(impl PreparedModels + ?Sized),
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let _switched = Switched::off(models);
        body()
    }
}

/// Models whose reduction is off; on again when dropped, also after a panic of the body.
struct Switched<'a, P: PreparedModels + ?Sized> {
    models: &'a P,
    before: Vec<bool>,
}

impl<'a, P: PreparedModels + ?Sized> Switched<'a, P> {
    fn off(models: &'a P) -> Self {
        let mut before = Vec::new();
        models.each_switch(&mut |switch| before.push(switch.swap(false, Ordering::Relaxed)));
        Self { models, before }
    }
}

impl<P: PreparedModels + ?Sized> Drop for Switched<'_, P> {
    fn drop(&mut self) {
        let mut before = self.before.iter();
        self.models.each_switch(&mut |switch| {
            switch.store(before.next().copied().unwrap_or(true), Ordering::Relaxed);
        });
    }
}

fn rescale(models: &(impl PreparedModels + ?Sized), factor: f64) -> Result<()> {
    let mut outcome = Ok(());
    models.each_parameter(&mut |parameter| {
        let scaled = gradient(parameter).map_err(Error::from).and_then(|gradient| {
            if let Some(mut gradient) = gradient {
                let _ = tch::no_grad(|| gradient.f_mul_scalar_(factor))?;
            }
            Ok(())
        });
        if outcome.is_ok() {
            outcome = scaled;
        }
    });
    outcome
}
