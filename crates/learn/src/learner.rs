//! The Learner: data, a model and a loss, with the operations on them.

mod fit;
mod freeze;
mod lr_find;
mod options;
mod parallel;
mod predict;
mod save;
mod schedules;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use brigade_nn::{IntoModel, Module};
use brigade_optim::AdamW;
use brigade_sharding::Axis;
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use tch::Tensor;

use crate::callback::{Callback, IntoCallbacks};
use crate::groups::Grouped;
use crate::hyper::Rates;
use crate::loaders::{BatchSource, Loaders, ModelInput, PreparedSource};
use crate::loss::CrossEntropy;
use crate::model::{AnyModel, Slot};
use crate::recorder::Recorder;
use crate::recording::RecorderOptions;
use crate::state::{CurrentBatch, LearnerState, Position};

pub use self::fit::FitOptions;
pub use self::lr_find::{LrFindOptions, LrFinding, Suggestion};
pub(crate) use self::predict::predicted;
pub use self::predict::{Part, Prediction, Predictions, Validation};
pub(crate) use self::save::state_dict;
pub use self::schedules::{FineTuneOptions, FlatCosOptions, OneCycleOptions, SgdrOptions};

/// Data, a model, a loss and metrics, trained by schedules and callbacks: fastai's `Learner`.
///
/// The same program runs on one process and, under `brigade launch`, on any number: a fit distributes the loaders over
/// the ranks, averages gradients, and undoes both when it ends. All ranks call the same methods.
///
/// A model that does not fit the memory of one rank can be sharded ([`Learner::sharding`], or the Accelerator's own
/// setting): from the first fit on each rank has a part of the weights, gradients and optimizer states, and methods
/// that read whole weights ([`LearnerState::gathered`], `save`, `export`, `predict`) must be called on every rank.
///
/// ```
/// use brigade_data::{DataLoader, TensorDataset};
/// use brigade_metrics::Accuracy;
/// use brigade_learn::{Learner, Loaders};
/// use brigade_nn::{Linear, ParamPath};
/// use brigade_train::Accelerator;
/// use tch::{Device, Kind, Tensor};
///
/// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// accelerator.set_seed(1);
/// let data = |rows: i64| {
///     let inputs = Tensor::rand([rows, 4], (Kind::Float, Device::Cpu));
///     let labels = inputs.argmax(-1, false);
///     TensorDataset::new((inputs, labels))
/// };
/// let train = DataLoader::new(data(200)?).batch_size(10).shuffle(true);
/// let valid = DataLoader::new(data(50)?).batch_size(10);
/// let data = Loaders::new(train, valid)?;
/// let model = |path: &ParamPath| Linear::new(path, 4, 4);
/// let mut learner = Learner::new(&accelerator, data, model)?.metrics(Accuracy).quiet(true);
/// learner.fit_one_cycle(2, 0.1, ())?;
/// assert!(learner.recorder().last("accuracy") > Some(0.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Learner {
    pub(crate) state: LearnerState,
    pub(crate) callbacks: Vec<Box<dyn Callback>>,
    pub(crate) train: Box<dyn BatchSource>,
    pub(crate) valid: Option<Box<dyn BatchSource>>,
    pub(crate) augmented_valid: Option<Box<dyn BatchSource>>,
    /// Loaders shared among the ranks, inside of [`Learner::distributed`].
    pub(crate) prepared: Option<PreparedLoaders>,
    /// Number of enclosing scopes of [`Learner::distributed`].
    entered: usize,
    /// Default learning rate of fits.
    pub(crate) lr: Option<f64>,
    /// First, middle and last momentum of cycles.
    pub(crate) momenta: [f64; 3],
    pub(crate) recording: RecorderOptions,
}

/// The loaders of this rank.
pub(crate) struct PreparedLoaders {
    pub(crate) train: Box<dyn PreparedSource>,
    pub(crate) valid: Option<Box<dyn PreparedSource>>,
}

impl Learner {
    /// Makes a Learner from data and a model, or the model's constructor: with fastai's Adam, the data's loss (cross
    /// entropy if they set none), no metrics, and the Accelerator's ranks and device. If ranks divide layers or
    /// sequences, the model must be built by [`Parallelism::model`](brigade_train::Parallelism::model).
    ///
    /// # Errors
    /// Fails when the model cannot be built or has no parameter, and with pipeline parallelism, which needs a loop with
    /// [`Accelerator::forward_backward`].
    pub fn new<X, C>(accelerator: &Accelerator, data: Loaders<X>, model: C) -> Result<Self>
    where
        X: ModelInput,
        C: IntoModel,
        C::Module: for<'a> Module<X::Ref<'a>, Output = Tensor> + 'static,
    {
        let mesh = accelerator.parallel().mesh()?;
        if mesh.size(Axis::Pipeline) > 1 {
            return Err(Error::invalid_argument(format!(
                "the Learner does not train on the mesh {mesh}, whose ranks have stages of a pipeline: write the loop with \
                 `Accelerator::forward_backward`, or start the program without --pipeline"
            )));
        }
        let model = model.into_model()?;
        let slot: Box<dyn AnyModel> = Box::new(Slot::<C::Module, X>::new(model));
        let groups = vec![slot.parameters().into_iter().map(|it| it.name).collect::<Vec<_>>()];
        if groups[0].is_empty() {
            return Err(Error::invalid_argument("the model has no parameter to train"));
        }
        let grouped = Grouped::new(Arc::new(AdamW::fastai()), groups, slot.norm_parameters());
        let Loaders { train, valid, augmented_valid, classes, loss, codec, .. } = data;
        let loss = loss.unwrap_or_else(|| Arc::new(CrossEntropy::default()));
        Ok(Self {
            state: LearnerState {
                accelerator: accelerator.clone(),
                model: slot,
                loss,
                grouped,
                metrics: Vec::new(),
                classes,
                codec,
                recorder: Recorder::default(),
                seed: 42,
                ends_on_nan: false,
                ended_on_nan: false,
                quiet: false,
                train_metrics: false,
                window_open: false,
                resume: None,
                save: None,
                position: Position::default(),
                batch: CurrentBatch::default(),
            },
            callbacks: Vec::new(),
            train,
            valid,
            augmented_valid,
            prepared: None,
            entered: 0,
            lr: None,
            momenta: [0.95, 0.85, 0.95],
            recording: RecorderOptions {
                train_metrics: false,
                valid_metrics: true,
                at_once: false,
            },
        })
    }

    /// Adds callbacks for all following fits.
    pub fn add(&mut self, callbacks: impl IntoCallbacks) {
        self.callbacks.extend(callbacks.into_callbacks());
    }

    /// Removes the callbacks of this type, and returns their number.
    pub fn remove<C: Callback>(&mut self) -> usize {
        let before = self.callbacks.len();
        self.callbacks.retain(|callback| !(&**callback as &dyn std::any::Any).is::<C>());
        before - self.callbacks.len()
    }

    /// Returns the first callback of this type, to read its results. `None` if there is none.
    #[must_use]
    pub fn callback<C: Callback>(&self) -> Option<&C> {
        self.callbacks.iter().find_map(|it| (&**it as &dyn std::any::Any).downcast_ref())
    }

    /// Returns the state that callbacks are called with.
    #[must_use]
    pub fn state(&self) -> &LearnerState {
        &self.state
    }

    /// Returns the state that callbacks are called with, to change it between fits.
    pub fn state_mut(&mut self) -> &mut LearnerState {
        &mut self.state
    }

    /// Runs `body` with the model and the loaders prepared once for all fits, validations and predictions within it,
    /// instead of once for each of them. Every rank calls it.
    ///
    /// # Errors
    /// Fails when the ranks' models or data differ, or when a rank is lost. Also returns the errors of `body`.
    pub fn distributed<R>(&mut self, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.enter()?;
        self.entered += 1;
        // After a panic of the body this scope is not left. A later `enter` then uses what is still prepared.
        let outcome = body(self);
        self.entered -= 1;
        self.leave();
        outcome
    }

    /// Initializes a deferred model, shards a model if the Accelerator shards models, and prepares a model that is
    /// divided among ranks. Every rank calls it.
    pub(crate) fn place_model(&mut self) -> Result<()> {
        let model = &self.state.model;
        let is_due = self.state.accelerator.parallel().sharding().is_some()
            || model.is_deferred()
            || model.is_in_parts();
        if is_due && !model.is_prepared() {
            self.enter()?;
            self.leave();
        }
        Ok(())
    }

    /// Undoes the preparation of the loaders, and of the model unless ranks have parts of it. Only needed after a panic
    /// inside of a fit or of [`Learner::distributed`], which otherwise do this when they end.
    pub fn detach(&mut self) {
        self.entered = 0;
        self.leave();
    }

    /// Returns `true` within a fit or [`Learner::distributed`], where the ranks work together.
    #[must_use]
    pub fn is_distributed(&self) -> bool {
        self.prepared.is_some()
    }

    /// Prepares the model and shares the loaders among the ranks.
    pub(crate) fn enter(&mut self) -> Result<()> {
        if self.prepared.is_some() && self.state.model.is_prepared() {
            return Ok(());
        }
        let prepared = self.prepare();
        if prepared.is_err() {
            self.leave();
        }
        prepared
    }

    fn prepare(&mut self) -> Result<()> {
        let accelerator = self.state.accelerator.clone();
        let train = self.train.prepare(&accelerator, true)?;
        let valid = match &self.valid {
            Some(valid) => Some(valid.prepare(&accelerator, false)?),
            None => None,
        };
        self.state.model.prepare(&accelerator)?;
        self.state.grouped.prepare(&accelerator)?;
        self.prepared = Some(PreparedLoaders { train, valid });
        Ok(())
    }

    pub(crate) fn leave(&mut self) {
        if self.entered == 0 {
            if !self.state.model.is_in_parts() {
                self.state.model.detach();
                self.state.grouped.detach();
            }
            self.prepared = None;
        }
    }

    /// Returns the learning rates of a fit without rates of its own.
    pub(crate) fn default_rates(&self) -> Rates {
        Rates::Same(self.lr.unwrap_or_else(|| self.state.grouped.settings_lr()))
    }
}

impl Deref for Learner {
    type Target = LearnerState;

    fn deref(&self) -> &LearnerState {
        &self.state
    }
}

impl fmt::Debug for Learner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Learner")
            .field("state", &self.state)
            .field("callbacks", &self.callbacks)
            .finish_non_exhaustive()
    }
}
