//! Backward, and gradients that are added up over several batches: [`GradientAccumulator`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use brigade_data::Batch;
use brigade_optim::Scheduler;
use brigade_torch::{Error, Result};
use parking_lot::{Mutex, MutexGuard};
use tch::Tensor;

use crate::gradients::models::{NoSyncGuard, PreparedModels, scale_gradients};
use crate::loss_weight::WeightedWindow;
use crate::precision::scaler::GradScaler;

/// Options of gradient accumulation, which adds up the gradients of several batches for one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientAccumulationOptions {
    /// Number of batches in a full window. Defaults to 1.
    pub steps: usize,
    /// `true` if the last batch of the data ends the window, however short it is; otherwise the window continues with
    /// the next epoch's first batches. Defaults to `true`.
    pub sync_with_dataloader: bool,
    /// `true` if gradients are averaged over the ranks after every batch, not only after the last of a window: more
    /// messages, for models whose gradients must not differ between ranks. Defaults to `false`.
    pub sync_each_batch: bool,
}

impl Default for GradientAccumulationOptions {
    fn default() -> Self {
        Self { steps: 1, sync_with_dataloader: true, sync_each_batch: false }
    }
}

impl GradientAccumulationOptions {
    /// Returns the options with the number of batches in `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, for a builder that
    /// does not set it.
    pub(crate) fn from_env() -> Result<Self> {
        use brigade_rank_env::env::ACCELERATE_GRADIENT_ACCUMULATION_STEPS as NAME;
        let Some(text) = std::env::var(NAME).ok().filter(|text| !text.is_empty()) else {
            return Ok(Self::default());
        };
        match text.trim().parse() {
            Ok(steps) if steps > 0 => Ok(Self { steps, ..Self::default() }),
            _ => Err(Error::invalid_argument(format!(
                "{NAME} is {text:?}, expected a whole number from 1"
            ))),
        }
    }
}

/// Adds gradients up over the batches of a window, and determines when the window ends. An Accelerator contains one; a
/// program without an Accelerator can use it on its own.
///
/// Clones are handles of the same window.
///
/// ```
/// use brigade_data::DataLoader;
/// use brigade_datasets::Digits;
/// use brigade_nn::{Linear, Model};
/// use brigade_optim::Sgd;
/// use brigade_train::{GradientAccumulationOptions, GradientAccumulator};
///
/// let accumulator = GradientAccumulator::new(GradientAccumulationOptions { steps: 4, ..Default::default() })?;
/// let model = Model::new(|p| Linear::new(p, 64, 10))?;
/// let mut optimizer = Sgd::new(0.1).build(&model)?;
/// let mut steps = 0;
/// for batch in &DataLoader::new(Digits::test()?).batch_size(64) {
///     let batch = batch?;
///     let (images, labels) = &*batch;
///     accumulator.accumulate(&model, &batch, || {
///         let loss = model.forward(&images.flatten(1, -1))?.cross_entropy_for_logits(labels);
///         accumulator.divide(&loss)?.backward();
///         if accumulator.sync_gradients() {
///             optimizer.step()?;
///             optimizer.zero_grad()?;
///             steps += 1;
///         }
///         Ok(())
///     })?;
/// }
/// assert!(steps > 0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GradientAccumulator {
    window: Arc<Window>,
}

/// Position of the loop in its window of batches.
#[derive(Debug)]
struct Window {
    settings: GradientAccumulationOptions,
    /// Batches of this window so far.
    position: AtomicUsize,
    /// Divisor of the current batch's loss: the number of batches in its window.
    divisor: AtomicUsize,
    /// `true` if the current batch ends its window: gradients are reduced and optimizers step.
    sync: AtomicBool,
    /// `true` if an optimizer's last step was skipped, so that schedules do not advance.
    skipped: AtomicBool,
    /// Last step, if its result is still pending.
    late: Mutex<LateStep>,
    weighted: Mutex<Option<WeightedWindow>>,
}

/// Makes an accumulator in which every batch is a window.
impl Default for GradientAccumulator {
    fn default() -> Self {
        Self::in_windows(GradientAccumulationOptions::default())
    }
}

impl GradientAccumulator {
    /// Makes an accumulator at the beginning of its first window.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for windows of 0 batches.
    pub fn new(settings: GradientAccumulationOptions) -> Result<Self> {
        if settings.steps == 0 {
            return Err(Error::invalid_argument(
                "gradient_accumulation_steps is 0; 1 steps the optimizer after every batch",
            ));
        }
        Ok(Self::in_windows(settings))
    }

    fn in_windows(settings: GradientAccumulationOptions) -> Self {
        let window = Window {
            settings,
            position: AtomicUsize::new(0),
            divisor: AtomicUsize::new(settings.steps),
            sync: AtomicBool::new(true),
            skipped: AtomicBool::new(false),
            late: Mutex::default(),
            weighted: Mutex::new(None),
        };
        Self { window: Arc::new(window) }
    }

    /// Returns the options of the accumulation.
    #[must_use]
    pub fn settings(&self) -> GradientAccumulationOptions {
        self.window.settings
    }

    /// Returns the number of batches whose gradients the current window has added up: 0 between windows.
    #[must_use]
    pub fn position(&self) -> usize {
        self.window.position.load(Ordering::Relaxed)
    }

    /// Returns `true` if the current batch ends its window: then gradients are averaged over the ranks, and optimizers
    /// and schedulers step.
    #[must_use]
    pub fn sync_gradients(&self) -> bool {
        self.window.sync.load(Ordering::Relaxed)
    }

    /// Returns the loss divided by the number of batches in the window, which is smaller for a window that the end of
    /// the data cuts short. The sum of the gradients over the window is then the gradient of the mean.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when the loss cannot be divided.
    pub fn divide(&self, loss: &Tensor) -> Result<Tensor> {
        match self.window.divisor.load(Ordering::Relaxed) {
            1 => Ok(loss.shallow_clone()),
            divisor => Ok(loss.f_div_scalar(divisor as f64)?),
        }
    }

    /// Returns the share of a batch's mean loss in the window: one over the number of batches.
    pub(crate) fn share(&self) -> f64 {
        1.0 / self.window.divisor.load(Ordering::Relaxed) as f64
    }

    /// Runs the body for one batch of a window: forward and backward of `models`, and the step if
    /// [`GradientAccumulator::sync_gradients`] is `true`. Prepared models average their gradients over the ranks only
    /// in the last backward of the window, unless [`GradientAccumulationOptions::sync_each_batch`] is set.
    ///
    /// The last batch of the data ends the window, however short it is.
    ///
    /// # Errors
    /// Returns the error of the body.
    pub fn accumulate<B, R>(
        &self,
        models: &(impl PreparedModels + ?Sized),
        batch: &Batch<B>,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let window = &*self.window;
        let GradientAccumulationOptions { steps, sync_with_dataloader, sync_each_batch } =
            window.settings;
        let length = self.position() + 1;
        let sync = (sync_with_dataloader && batch.is_last()) || length >= steps;
        window.sync.store(sync, Ordering::Relaxed);
        if !sync {
            window.position.store(length, Ordering::Relaxed);
            if sync_each_batch {
                return body();
            }
            let _switched = NoSyncGuard::off(models);
            return body();
        }
        window.position.store(0, Ordering::Relaxed);
        // The divisor of a window of weighted losses is determined in its last backward.
        if length == steps || self.weighted().is_some() {
            return body();
        }
        // The data end before the window does. The accumulated gradients were divided by the length of a full window:
        // rescale them to the actual length before the last gradients are added.
        scale_gradients(models, &Tensor::from(steps as f64 / length as f64))?;
        let _restored = ShortWindowGuard::to(window, length);
        body()
    }

    /// Discards an interrupted window. The gradients stay: clear them with the optimizer's `zero_grad`.
    pub fn reset(&self) {
        let window = &*self.window;
        window.position.store(0, Ordering::Relaxed);
        window.divisor.store(window.settings.steps, Ordering::Relaxed);
        window.sync.store(true, Ordering::Relaxed);
        *self.weighted() = None;
    }

    /// Continues within a window, from a checkpoint.
    pub(crate) fn set_position(&self, position: usize) {
        self.window.position.store(position, Ordering::Relaxed);
        self.window.sync.store(true, Ordering::Relaxed);
    }

    /// Returns the number of batches of a full window.
    pub(crate) fn steps(&self) -> usize {
        self.window.settings.steps
    }

    /// Returns `true` if the batch's step was skipped because of an overflow. Waits for the device if it decides.
    pub(crate) fn skipped(&self) -> bool {
        // A failed device returns an error in the next operation.
        let _ = self.settle();
        self.window.skipped.load(Ordering::Relaxed)
    }

    /// Marks that the device decides whether the last step was skipped.
    pub(crate) fn set_skipped_later(&self, scaler: &GradScaler) {
        self.window.late.lock().scaler = Some(scaler.clone());
    }

    /// Returns `true` if the device's decision is still pending.
    pub(crate) fn is_late(&self) -> bool {
        self.window.late.lock().scaler.is_some()
    }

    /// Steps a schedule once the result of the optimizer's step is available.
    pub(crate) fn advance_later(&self, scheduler: Scheduler, stride: u64) {
        self.window.late.lock().owed.push((scheduler, stride));
    }

    /// Determines whether the last step was made, and runs the work that waited for it. Does nothing if no result is
    /// pending.
    pub(crate) fn settle(&self) -> Result<()> {
        let LateStep { scaler, owed } = std::mem::take(&mut *self.window.late.lock());
        let Some(scaler) = scaler else { return Ok(()) };
        let skipped = scaler.settle()?;
        self.set_skipped(skipped);
        for (mut scheduler, stride) in owed.into_iter().filter(|_| !skipped) {
            scheduler.advance(stride)?;
        }
        Ok(())
    }

    pub(crate) fn set_skipped(&self, skipped: bool) {
        self.window.skipped.store(skipped, Ordering::Relaxed);
    }

    pub(crate) fn weighted(&self) -> MutexGuard<'_, Option<WeightedWindow>> {
        self.window.weighted.lock()
    }
}

/// A step whose execution the device decides.
#[derive(Debug, Default)]
struct LateStep {
    scaler: Option<GradScaler>,
    /// Schedules that advance if the step was made, each with its number of steps.
    owed: Vec<(Scheduler, u64)>,
}

/// Makes a window shorter than the others until it is dropped, also after a panic of the body.
struct ShortWindowGuard<'a>(&'a Window);

impl<'a> ShortWindowGuard<'a> {
    fn to(window: &'a Window, length: usize) -> Self {
        window.divisor.store(length, Ordering::Relaxed);
        Self(window)
    }
}

impl Drop for ShortWindowGuard<'_> {
    fn drop(&mut self) {
        self.0.divisor.store(self.0.settings.steps, Ordering::Relaxed);
    }
}
