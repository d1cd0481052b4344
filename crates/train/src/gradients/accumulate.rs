//! Backward, and gradients that are added up over several batches.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use brigade_data::Batch;
use brigade_torch::{BackwardOptions, Tensor, gradient};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradients::weighted::WeightedWindow;
use crate::model::{NoSyncGuard, PreparedModels};

/// How gradients of several batches become one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientAccumulation {
    /// Batches of a full window; 1.
    pub steps: usize,
    /// The last batch of the data ends the window, however short it is; true. Else the window goes on
    /// with the next epoch's first batches.
    pub sync_with_dataloader: bool,
    /// Average over the ranks after every batch, not only after the last of a window: more messages,
    /// for models whose gradients must not differ between ranks; false.
    pub sync_each_batch: bool,
}

impl Default for GradientAccumulation {
    fn default() -> Self {
        Self { steps: 1, sync_with_dataloader: true, sync_each_batch: false }
    }
}

impl GradientAccumulation {
    /// Unless the builder sets it: what `ACCELERATE_GRADIENT_ACCUMULATION_STEPS` says.
    pub(crate) fn from_env() -> Result<Self> {
        use brigade_world::env::ACCELERATE_GRADIENT_ACCUMULATION_STEPS as NAME;
        let Some(text) = std::env::var(NAME).ok().filter(|text| !text.is_empty()) else {
            return Ok(Self::default());
        };
        match text.trim().parse() {
            Ok(steps) if steps > 0 => Ok(Self { steps, ..Self::default() }),
            _ => Err(Error::InvalidArgument(format!(
                "{NAME} is {text:?}, expected a whole number from 1"
            ))),
        }
    }
}

/// Where the loop stands in its window of batches.
#[derive(Debug)]
pub(crate) struct Accumulation {
    pub(crate) settings: GradientAccumulation,
    /// Batches of this window so far.
    position: AtomicUsize,
    /// What the current batch's loss is divided by: the batches of its window.
    divisor: AtomicUsize,
    /// Whether the current batch ends its window: gradients are reduced and optimizers step.
    sync: AtomicBool,
    /// Whether an optimizer's last step was left out, so that schedules stay.
    skipped: AtomicBool,
    pub(crate) weighted: Mutex<Option<WeightedWindow>>,
}

impl Accumulation {
    pub(crate) fn new(settings: GradientAccumulation) -> Result<Self> {
        if settings.steps == 0 {
            return Err(Error::InvalidArgument(
                "gradient_accumulation_steps is 0; 1 steps the optimizer after every batch".into(),
            ));
        }
        Ok(Self {
            settings,
            position: AtomicUsize::new(0),
            divisor: AtomicUsize::new(settings.steps),
            sync: AtomicBool::new(true),
            skipped: AtomicBool::new(false),
            weighted: Mutex::new(None),
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
        self.settings.steps
    }

    pub(crate) fn sync(&self) -> bool {
        self.sync.load(Ordering::Relaxed)
    }

    /// Whether the batch's step was left out for an overflow.
    pub(crate) fn skipped(&self) -> bool {
        self.skipped.load(Ordering::Relaxed)
    }

    pub(crate) fn set_skipped(&self, skipped: bool) {
        self.skipped.store(skipped, Ordering::Relaxed);
    }

    /// Forgets a window that was broken off.
    pub(crate) fn reset(&self) {
        self.position.store(0, Ordering::Relaxed);
        self.divisor.store(self.settings.steps, Ordering::Relaxed);
        self.sync.store(true, Ordering::Relaxed);
        *self.window() = None;
    }

    pub(crate) fn window(&self) -> MutexGuard<'_, Option<WeightedWindow>> {
        self.weighted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Accelerator {
    /// Batches of a full accumulation window.
    #[must_use]
    pub fn gradient_accumulation_steps(&self) -> usize {
        self.accumulation.settings.steps
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
    /// [`Error::Torch`] when a peer is gone; [`Error::Tensor`] when the loss has no graph or more than one
    /// value; [`Error::LossNotFinite`] on every rank when the loss of one is infinite or NaN
    /// ([`crate::AcceleratorBuilder::check_loss`]).
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, BackwardOptions::default())
    }

    /// [`Accelerator::backward`] with options: `retain_graph` for a further backward through the same
    /// forward, `create_graph` for gradients of gradients. [`brigade_torch::grad`] gives gradients of chosen
    /// tensors, such as a critic's input under WGAN-GP.
    ///
    /// A second backward through a graph that was kept adds to the gradients, and is averaged over the ranks
    /// as the first. The reducer cannot do that with `find_unused_parameters` or `static_graph`, nor while
    /// ranks join with unequal inputs: then it is an error.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_torch::{BackwardOptions, GradOptions, grad};
    /// use brigade_train::{Accelerator, Kind, Tensor};
    ///
    /// let accelerator = Accelerator::new()?;
    /// let critic = accelerator.prepare(Model::new(|p| Linear::new(p, 4, 1))?)?;
    /// let mixed = Tensor::ones([8, 4], (Kind::Float, accelerator.device())).set_requires_grad(true);
    /// let score = critic.forward(&mixed)?.sum(Kind::Float);
    /// let backward = BackwardOptions { create_graph: true, ..Default::default() };
    /// let slopes = grad(&[&score], &[&mixed], GradOptions { backward, ..Default::default() })?;
    /// let norm = slopes[0].as_ref().unwrap().square().sum_dim_intlist(1, false, None).sqrt();
    /// accelerator.backward(&(norm - 1.0).square().mean(Kind::Float))?;
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Accelerator::backward`].
    #[track_caller]
    pub fn backward_with(&self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        let divisor = self.accumulation.divisor.load(Ordering::Relaxed);
        match divisor {
            1 => self.run_backward(loss, options),
            divisor => self.run_backward(&loss.f_div_scalar(divisor as f64)?, options),
        }
    }

    /// The backward pass of a loss that has its share of the window already.
    #[track_caller]
    pub(crate) fn run_backward(&self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        // Reading the loss waits for the device and for the other ranks, so only debug mode does it here. With a
        // loss scale, an overflowing loss is expected.
        let finite = !self.processes.job.debug
            || self.grad_scaler().is_some()
            || loss.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0;
        if let Some(group) = self.traced() {
            group.check_backward(finite)?;
        }
        if !finite {
            let rank = Some(self.processes.job.rank());
            return Err(Error::LossNotFinite { rank, step: None, weights_corrupted: false });
        }
        let Some(check) = &self.loss_check else {
            return self.unchecked_backward(loss, options);
        };
        let outcome = check.around(loss, || self.unchecked_backward(loss, options));
        if matches!(outcome, Err(Error::LossNotFinite { .. })) {
            // A program that leaves the batch out leaves the schedule where it is.
            self.accumulation.set_skipped(true);
        }
        outcome
    }

    fn unchecked_backward(&self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        let backward = |loss: &Tensor| match self.group() {
            Some(group) => group.backward_with(loss, options),
            None => brigade_torch::backward_with(loss, options),
        };
        match self.grad_scaler() {
            None => backward(loss)?,
            Some(scaler) => backward(&scaler.scale_loss(loss)?)?,
        }
        Ok(())
    }

    /// Discards an interrupted window and the check of its losses.
    pub(crate) fn reset_window(&self) {
        self.accumulation.reset();
        if let Some(check) = &self.loss_check {
            check.reset();
        }
    }

    /// Whether the last step of a prepared optimizer was left out, because gradients of 16 bits had
    /// overflowed or a loss was not finite. Schedules stay where they are then.
    #[must_use]
    pub fn optimizer_step_was_skipped(&self) -> bool {
        self.accumulation.skipped()
    }

    /// Runs the body for one batch of an accumulation window. The model's forward, the backward, the
    /// optimizer's and scheduler's `step` and `zero_grad` all go inside; whether they do something is
    /// decided here.
    ///
    /// The last batch of the data ends the window, however short it is.
    ///
    /// ```no_run
    /// # use brigade_train::{Accelerator, PreparedOptimizer, PreparedModel, PreparedLoader, Result};
    /// # use brigade_models::Cnn;
    /// # use brigade_datasets::LabelledImages;
    /// # fn f(accelerator: &Accelerator, model: &PreparedModel<Cnn>, optimizer: &mut PreparedOptimizer,
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
        let GradientAccumulation { steps, sync_with_dataloader, sync_each_batch } = state.settings;
        let length = state.position.load(Ordering::Relaxed) + 1;
        let sync = (sync_with_dataloader && batch.is_last()) || length >= steps;
        state.sync.store(sync, Ordering::Relaxed);
        if !sync {
            state.position.store(length, Ordering::Relaxed);
            return if sync_each_batch { body() } else { self.no_sync(models, body) };
        }
        state.position.store(0, Ordering::Relaxed);
        // A window of weighted losses finds its divisor in its last backward.
        if length == steps || state.window().is_some() {
            return body();
        }
        // The data end before the window does. What has been added up was divided by the length of a
        // full window: bring it to this one's before the last gradients come.
        scale_gradients(models, steps as f64 / length as f64)?;
        let _restored = ShortWindowGuard::to(state, length);
        body()
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
        let _switched = NoSyncGuard::off(models);
        body()
    }
}

/// A window that is shorter than the others; the next one is not, also after a panic of the body.
struct ShortWindowGuard<'a>(&'a Accumulation);

impl<'a> ShortWindowGuard<'a> {
    fn to(state: &'a Accumulation, length: usize) -> Self {
        state.divisor.store(length, Ordering::Relaxed);
        Self(state)
    }
}

impl Drop for ShortWindowGuard<'_> {
    fn drop(&mut self) {
        self.0.divisor.store(self.0.settings.steps, Ordering::Relaxed);
    }
}

pub(crate) fn scale_gradients(models: &(impl PreparedModels + ?Sized), factor: f64) -> Result<()> {
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
