//! The callbacks that come with the Learner.

mod average;
pub(crate) mod checkpoint;
mod freezing;
mod gradients;
mod logs;
mod measure;
mod mix;
mod param_scheduler;
mod progress;
mod show_graph;
mod trackers;

pub use average::{Ema, Swa};
pub use checkpoint::Checkpoint;
pub use freezing::{FreezeSchedule, NormFreeze, ShortEpoch};
pub use gradients::{GradientAccumulation, GradientClip, TerminateOnNan};
pub use logs::{CsvLog, TrackerLog};
pub use measure::{ActivationStats, BINS, LayerStats, RANGE, Times, Timing};
pub use mix::{CutMix, MixDraw, MixSource, MixUp};
pub use param_scheduler::ParamScheduler;
pub use progress::Progress;
pub use show_graph::ShowGraph;
pub use trackers::{Better, EarlyStopping, ReduceLrOnPlateau, SaveModel};
