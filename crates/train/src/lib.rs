//! The Accelerator: one training loop for one process or many.
//!
//! A loop for one process becomes one for many with four changes: make an [`Accelerator`], let it
//! [`prepare`](Accelerator::prepare) the model, the optimizer and the loaders, call its
//! [`backward`](Accelerator::backward), and [`gather_for_metrics`](Accelerator::gather_for_metrics) what
//! is counted. Started alone, the same program runs as one process.

mod accelerator;
mod accumulate;
mod batch_size;
mod checkpoint;
mod clip;
mod connect;
mod dispatch;
mod error;
mod gather;
mod hook;
mod join;
mod loader;
mod local_sgd;
mod log;
mod memory_format;
mod meter;
mod metrics;
mod model;
mod optim;
mod position;
mod precision;
mod prepare;
mod profile;
mod progress;
mod registry;
mod save;
mod scaler;
mod scheduler;
mod scope;
mod split;
mod start_line;
mod tracking;
mod trigger;
mod watch;
mod weighted;

pub use accelerator::{Accelerator, AcceleratorBuilder};
pub use accumulate::GradientAccumulation;
pub use brigade_checkpoint::Value;
pub use brigade_torch::{
    Bucket, Compression, Device, GradientHook, Kind, ReduceOp, ReducerOptions, Tensor, Tensors,
};
pub use brigade_track as track;
pub use checkpoint::{
    Checkpointed, HookError, HookHandle, LoadOptions, Loaded, ProjectConfiguration,
};
pub use clip::{ClipNorm, Parameters};
pub use dispatch::{Layout, Rebuild};
pub use error::{Error, Result};
pub use hook::{CommHook, PowerSgd};
pub use join::JoinInputs;
pub use loader::{Batches, Epochs, PreparedLoader};
pub use local_sgd::LocalSgd;
pub use log::{LogLayer, LogOptions, Logger};
pub use meter::{Meter, ProcessMemory, Rates};
pub use metrics::Accuracy;
pub use model::{PreparedModel, PreparedModels};
pub use optim::{
    Adafactor, Adagrad, Adam, Group, GroupState, Lamb, Lars, Lookahead, Muon, MuonRate, Optimizer,
    OptimizerState, ParameterGroup, ParameterState, RAdam, RmsProp, Sgd, StateMismatch, Trainable,
};
pub use precision::{AutocastOptions, Precision};
pub use prepare::Prepare;
pub use profile::{OperationSummary, Profile, ProfileOptions, ProfileSchedule, Profiler, Table};
pub use progress::Progress;
pub use scaler::{GradScaler, GradScalerOptions, GradScalerState};
pub use scheduler::{Scheduler, SchedulerState};
pub use split::Split;
pub use tracking::TrackerHandle;
