//! The callbacks that come with the Learner.

mod gradients;
mod param_scheduler;
mod progress;
mod trackers;

pub use gradients::{GradientAccumulation, GradientClip, TerminateOnNan};
pub use param_scheduler::ParamScheduler;
pub use progress::Progress;
pub use trackers::{Better, EarlyStopping, ReduceLrOnPlateau, SaveModel};
