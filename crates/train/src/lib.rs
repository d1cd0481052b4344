//! The Accelerator: one training loop for one process or many.
//!
//! A loop for one process becomes one for many with four changes: make an [`Accelerator`], let it
//! [`prepare`](Accelerator::prepare) the model, the optimizer and the loaders, call its
//! [`backward`](Accelerator::backward), and [`gather_for_metrics`](Accelerator::gather_for_metrics) what
//! is counted. Started alone, the same program runs as one process.
//!
//! Its parts serve programs without an Accelerator: [`Processes`] (the ranks and their collectives),
//! [`GradientAccumulator`], [`ClipNorm`] and [`clip_grad_value`] (gradients), [`GradScaler`] and
//! [`AutocastOptions`] (precision), [`PreparedLoader::new`] (data), [`Checkpoints`] and [`Stateful`], and
//! [`Trackers`].

mod accelerator;
mod batch_size;
mod capture;
mod checkpoint;
mod device_memory;
mod error;
mod gradients;
mod loader;
mod model;
mod optimizer;
mod precision;
mod prepare;
mod processes;
mod registry;
mod save;
mod scheduler;
mod watch;

pub use accelerator::connect::ConnectOptions;
pub use accelerator::{Accelerator, AcceleratorBuilder};
pub use brigade_checkpoint::{TensorInfo, Value};
#[doc(hidden)]
pub use brigade_data::__derive;
pub use brigade_optim::rules::*;
pub use brigade_optim::{
    Group, GroupState, Lookahead, LrSchedule, Optimizer, OptimizerState, ParameterGroup,
    ParameterState, Rule, Scheduler, SchedulerState, StateMismatch, Trainable,
};
pub use brigade_torch::{
    BackwardOptions, Bucket, Compression, Device, GradientHook, Kind, ReduceOp, ReducerOptions,
    Split, Tensor, TensorTree, TreeSpec,
};
pub use brigade_track as track;
pub use capture::CapturedStep;
pub use checkpoint::{
    Checkpointed, Checkpoints, HookError, HookHandle, LoadOptions, Loaded, ProjectConfiguration,
    Stateful,
};
pub use device_memory::OutOfMemory;
pub use error::{Error, Result};
pub use gradients::accumulate::{GradientAccumulation, GradientAccumulator};
pub use gradients::clip::{ClipNorm, Parameters, clip_grad_value};
pub use gradients::hook::{CommHook, PowerSgd, StatefulHook};
pub use gradients::join::{JoinInputs, Joining};
pub use gradients::local_sgd::LocalSgd;
pub use gradients::weighted::LossWeight;
pub use loader::{Batches, DATASET_SHARE, DataLoaderConfiguration, Loader, PreparedLoader};
pub use model::{PreparedModel, PreparedModels};
pub use optimizer::PreparedOptimizer;
pub use precision::scaler::{GradScaler, GradScalerOptions, GradScalerState};
pub use precision::{AutocastOptions, Precision};
pub use prepare::Prepare;
pub use processes::Processes;
pub use processes::metrics::{Accuracy, FBeta, Mean, Metric, TopK};
pub use scheduler::PreparedScheduler;
pub use watch::log::{LogLayer, LogOptions, Logger};
pub use watch::meter::{Meter, ProcessMemory, Rates};
pub use watch::profile::{
    OperationSummary, Profile, ProfileOptions, ProfileSchedule, Profiler, Table,
};
pub use watch::progress::{Progress, ProgressValues};
pub use watch::tracking::{TrackerHandle, Trackers};
