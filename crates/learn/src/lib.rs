//! The Learner: fastai's layer above the loop. Data, a model and metrics, trained by schedules and callbacks, on
//! one process or many.
//!
//! It is built on the public API of the Accelerator, the optimizers and the loaders. [`Learner`] has an example;
//! the book's page on the Learner goes through all of it.

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
