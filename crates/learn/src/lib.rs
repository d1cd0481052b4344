//! The Learner: fastai's layer above the loop. Data, a model and metrics, trained by schedules and callbacks, on
//! one process or many.
//!
//! It is built on the public API of the Accelerator, the optimizers and the loaders. The page "The Learner" of the book
//! is its guide.
//!
//! ```
//! use brigade_data::{DataLoader, TensorDataset};
//! use brigade_metrics::Accuracy;
//! use brigade_learn::{Learner, Loaders};
//! use brigade_nn::{Linear, ParamPath};
//! use brigade_train::Accelerator;
//! use tch::{Device, Kind, Tensor};
//!
//! let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
//! accelerator.set_seed(1);
//! let data = |rows: i64| {
//!     let inputs = Tensor::rand([rows, 4], (Kind::Float, Device::Cpu));
//!     let labels = inputs.argmax(-1, false);
//!     TensorDataset::new((inputs, labels))
//! };
//! let train = DataLoader::new(data(200)?).batch_size(10).shuffle(true);
//! let valid = DataLoader::new(data(50)?).batch_size(10);
//! let data = Loaders::new(train, valid)?;
//! let model = |path: &ParamPath| Linear::new(path, 4, 4);
//! let mut learner = Learner::new(&accelerator, data, model)?.metrics(Accuracy).quiet(true);
//! learner.fit_one_cycle(2, 0.1, ())?;
//! assert!(learner.recorder().last("accuracy") > Some(0.5));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How the Learner works
//!
//! A [`Learner`] has no type parameters: its model is behind `AnyModel` (`model.rs`), its loaders behind
//! `BatchSource` (`loaders.rs`), so a callback gets one [`LearnerState`] for every model and batch. The Accelerator
//! is an argument of [`Learner::new`] and of a data block's `loaders`; a Learner that found it by itself would need a
//! global variable.
//!
//! The loop (`learner/fit.rs`) sends fastai's events in its order. A cancellation is a value,
//! `Err(Interrupt::Cancel(level))`, which `?` carries to the part of the loop that it cancels; cancelling a part that
//! does not run is an error that names the callback. [`Callback::ended`] is called however a fit ends, so that changes
//! for the time of a fit are undone. A callback is called on the ranks that it chooses ([`Ranks`](callback::Ranks)):
//! all, if its decisions depend on values that are equal everywhere; rank 0, if it writes and does not cancel; or all
//! with a vote at certain events, where a cancellation of any rank is one of all.
//!
//! A fit prepares the model, shares the loaders and prepares the optimizer, and undoes all of that at its end
//! (`Learner::enter`, `leave`), so freezing between fits creates a new reducer. A sharded model stays prepared:
//! freezing changes its shards, all ranks run the same number of validation batches, and code that needs whole weights
//! gathers them on all ranks. [`Learner::distributed`] keeps the preparation for several fits.
//!
//! Validation is shared batch by batch, without duplicates: a rank may have one batch less than others, or none, so
//! buffers are broadcast before it. A metric keeps sums or rows of each batch; at the end they are added or joined in
//! the order of the batches (`MetricState` of `brigade-metrics`), which is the order of one process. So for equal
//! predictions values are equal to the last digit, on any number of ranks. Predictions are equal if a batch has the
//! same samples in the same order, and its rank has as many threads: MKL chooses kernels by the number of rows, so a
//! sample in another batch may have other last digits (`crates/nn/tests/numeric/cpu/rounding.rs` tests what is
//! guaranteed, for float64, float32 and bfloat16).
//!
//! Losses of training batches stay on the device and are read at the end of the epoch, those of all ranks in one
//! message; on a single CPU they are read at once, where reading does not wait.
//!
//! Hyperparameters belong to parameter groups (`groups.rs`). The groups of an optimizer are these, each divided into
//! parameters with and without weight decay. Freezing creates a new optimizer, since fastai clears the optimizer's
//! state, too.
//!
//! A checkpoint (`callbacks/checkpoint.rs`) is the Accelerator's with one more file: the recorder, the position, and
//! what each callback returns from `state`. A resumed fit sends `before_fit`, `before_epoch` and `before_train`, and
//! then loads the checkpoint, because all objects are registered by then.

pub mod callback;
pub mod callbacks;
pub mod data;
mod error;
mod event;
mod export;
mod fit_progress;
mod groups;
mod hyper;
pub mod interpretation;
mod learner;
mod loaders;
pub mod loss;
mod main_process;
mod model;
mod parallel;
mod pictures;
mod recorder;
mod recording;
mod saved;
mod state;
mod vision_learner;

pub use callback::Callback;
pub use error::LearnError;
pub use event::Event;
pub use export::Predictor;
pub use hyper::{GroupHypers, Hyper, Rates};
pub use learner::{
    FineTuneOptions, FitOptions, FlatCosOptions, Learner, LrFindOptions, LrFinding,
    OneCycleOptions, Part, Prediction, Predictions, SgdrOptions, Suggestion, Validation,
};
pub use loaders::{Item, ItemCodec, Loaders, ModelInput, Picture, Target};
pub use recorder::{EpochRow, Recorder};
pub use state::LearnerState;
pub use vision_learner::{VisionOptions, unet_learner, vision_learner};

pub mod prelude;
