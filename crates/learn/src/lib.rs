//! The Learner: fastai's layer above the loop. Data, a model and metrics, trained by schedules and callbacks, on
//! one process or many.

pub mod callback;
mod error;
mod event;
mod loaders;
pub mod loss;
pub mod metrics;
mod state;

pub use error::{Error, Result};
pub use event::Event;
pub use loaders::{Item, ItemCodec, Loaders, ModelInput, Picture, Target};
pub use state::LearnerState;
