//! The Accelerator: one training loop for one process or many.
//!
//! A loop for one process becomes one for many with four changes: make an [`Accelerator`], let it
//! [`prepare`](Accelerator::prepare) the model, the optimizer and the loaders, call its
//! [`backward`](Accelerator::backward), and [`update_metric`](Accelerator::update_metric) with what is counted.
//! Started alone, the same program runs as one process.
//!
//! Its parts serve programs without an Accelerator: [`Processes`] (the ranks and their collectives),
//! [`GradientAccumulator`], [`ClipNorm`] and [`clip_grad_value`] (gradients), [`GradScaler`] and
//! [`AutocastOptions`] (precision), [`PreparedLoader::new`] (data), [`Checkpoints`] and [`Stateful`], and
//! [`Trackers`].

mod accelerator;
mod arrangement;
mod batch_size;
mod capture;
mod checkpoint;
mod context_parallel;
mod error;
mod full_state;
mod gradients;
mod job;
mod loader;
mod loss_weight;
mod model;
mod optimizer;
mod parameters;
mod pipeline;
mod precision;
mod processes;
mod recorder;
mod registry;
mod scheduler;
mod sharding;
mod stateful;
mod tensor_parallel;
mod watch;
mod weights_file;

pub use accelerator::{Accelerator, AcceleratorBuilder, MemoryReport, MemoryRow, Prepare};
#[doc(hidden)]
pub use brigade_data::__derive;
pub use capture::CapturedStep;
pub use checkpoint::{Checkpoints, HookHandle, LoadOptions, Loaded, ProjectConfiguration};
pub use error::{MemoryPlan, OutOfMemory, TrainError};
pub use gradients::accumulate::{GradientAccumulationOptions, GradientAccumulator};
pub use gradients::clip::{ClipNorm, clip_grad_value};
pub use gradients::hook::{CommHook, PowerSgd, StatefulHook};
pub use gradients::join::JoinInputs;
pub use gradients::local_sgd::LocalSgd;
pub use gradients::models::{Joining, PreparedModels};
pub use job::connect::ConnectOptions;
pub use loader::placement::DATASET_SHARE;
pub use loader::source::{DataLoaderConfiguration, Loader};
pub use loader::{Batches, PreparedLoader};
pub use loss_weight::LossWeight;
pub use model::PreparedModel;
pub use optimizer::PreparedOptimizer;
pub use parameters::Parameters;
pub use pipeline::{Pipeline, PipelineLoss, PipelineOptions, StepLoss};
pub use precision::scaler::{GradScaler, GradScalerOptions, GradScalerState};
pub use precision::{AutocastOptions, Precision};
pub use processes::Processes;
pub use registry::CheckpointObject;
pub use scheduler::PreparedScheduler;
pub use stateful::Stateful;
pub use watch::log::{LogLayer, LogOptions, Logger, Logging};
pub use watch::meter::{Meter, ProcessMemory, Rates};
pub use watch::profile::{
    OperationSummary, Profile, ProfileOptions, ProfileSchedule, Profiler, Table,
};
pub use watch::progress::{Progress, ProgressValues};
pub use watch::tracking::{TrackerHandle, Trackers};
