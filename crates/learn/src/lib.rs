//! The Learner: fastai's layer above the loop. Data, a model and metrics, trained by schedules and callbacks, on
//! one process or many.

pub mod callback;
mod error;
mod event;
pub mod loss;
pub mod metrics;
mod state;

pub use error::{Error, Result};
pub use event::Event;
pub use state::LearnerState;
