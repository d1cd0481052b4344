//! The Accelerator: one training loop for one process or many.
//!
//! A training loop for one process becomes one for many with four changes: create an [`Accelerator`], pass the model,
//! the optimizer and the loaders to [`prepare`](Accelerator::prepare), call [`backward`](Accelerator::backward) of the
//! Accelerator in place of the loss's, and update metrics with [`update_metric`](Accelerator::update_metric). Without a
//! launcher, the same program runs as one process.
//!
//! ```
//! use brigade_data::DataLoader;
//! use brigade_datasets::Digits;
//! use brigade_models::Cnn;
//! use brigade_nn::Model;
//! use brigade_optim::Adam;
//! use brigade_train::Accelerator;
//!
//! let accelerator = Accelerator::new()?;
//! let model = Model::new(Cnn::new)?;
//! let optimizer = Adam::default().lr(5e-3).build(&model)?;
//! let train = DataLoader::new(Digits::train()?.resize(28, 28)?).batch_size(64).shuffle(true);
//! let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
//!
//! model.train();
//! for batch in &train {
//!     let (images, labels) = batch?.into_data();
//!     let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
//!     accelerator.backward(&loss)?;
//!     optimizer.step()?;
//!     optimizer.zero_grad()?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! Its parts serve programs without an Accelerator: [`Processes`] (the ranks and their collectives),
//! [`GradientAccumulator`], [`ClipNorm`] and [`clip_grad_value`] (gradients), [`GradScaler`] and
//! [`AutocastOptions`] (precision), [`PreparedLoader::new`] (data), [`Checkpoints`] and [`Stateful`], and
//! [`Trackers`].
//!
//! # Layers of this crate
//!
//! All methods of [`Accelerator`] are in `accelerator/`, each a call of one of the values above; the other modules do
//! not depend on the Accelerator. Each group uses only modules of the groups before it: `error`, `recorder`, `job`
//! (place, connections), `parameters`, `stateful`; `precision`, `processes`; `gradients`; `registry`; `model`,
//! `optimizer`, `scheduler`, `loader`, `capture`; `checkpoint`, `watch`, `batch_size`; `accelerator`. `prepare`
//! registers its results for checkpoints; without it, [`Checkpoints::register`] does.
//!
//! # How a step runs on several ranks
//!
//! [`Accelerator::prepare`] compares the models of all ranks by a fingerprint of names, shapes and types (the lists
//! themselves are sent only if the fingerprints differ), broadcasts the weights of rank 0, and makes a reducer
//! (c10d's `Reducer`, by `brigade-torch`). The forward broadcasts buffers. The backward fills buckets and reduces
//! each as soon as it is full. The optimizer runs one fused kernel over all parameters. A communication hook may
//! start a message in the call for one bucket and wait for it in a later call, at the latest in that for the last
//! bucket.
//!
//! A loader is a plan: every rank computes the order of the epoch from the seed, its own part of it, and the number
//! of real samples in every rank's batch. So gathering for metrics needs no message to find the duplicates.
//!
//! [`PreparedOptimizer`] checks before each step, in this order: that the accumulation window is complete, that the
//! losses of all ranks were finite, and that no gradient overflowed under the loss scale (agreed between the ranks).
//! [`PreparedScheduler`] steps when the optimizer has stepped. [`PreparedModel::set_trainable`] freezes and unfreezes
//! parameters after `prepare`: the ranks compare their arguments; then the optimizers rebuild their groups and states,
//! and the model its reducer, its communication hook and its list for checkpoints.
//!
//! Sharded models, pipelines, divided layers and recorded steps are described in the modules `sharding`, `pipeline`,
//! `arrangement` and `capture`.
//!
//! # Groups with Python ranks
//!
//! A process group of Brigade has PyTorch's store layout (`default_pg/0//cpu//…`), its Gloo backend and its reducer,
//! so a Python rank can be part of it if it sends the same messages:
//!
//! - `prepare` of a model sends one all-gather of `int64[2]` (number of tensors, fingerprint; the line of a parameter
//!   that is channels_last contains that), then coalesced broadcasts of parameters and buffers in messages of 250
//!   MiB.
//! - `prepare` of a loader sends one all-gather of `int64[2]` (samples, seed).
//! - The check of losses sends no message. A rank whose loss is not finite adds NaN to one gradient of its next
//!   reduction, so the first elements of the reduced gradients show it to every rank before a weight changes. A plain
//!   DDP rank in Python needs no code for it. The rank is named through a key of the store, which only that rank
//!   writes. `check_loss(false)` turns the check off.
//! - Each rank of Brigade sets a key `shared_memory/RANK` in the group's part of the store before it connects. A
//!   Python rank does not, so all ranks see that one is missing, and every collective is Gloo's own.
//!
//! `examples/fashion_mnist/tests/needs/python.rs` tests this, under torchrun and under `brigade launch`. In NCHW, where
//! both sides have the same kernels, the accuracy agrees to the bit. In channels_last, Brigade's batch norm with ReLU
//! equals PyTorch's up to rounding.

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
mod model_parallel;
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
mod watch;
mod weight_average;
mod weights_file;

pub use accelerator::{
    Accelerator, AcceleratorBuilder, MemoryReport, MemoryRow, ModelSetting, Parallelism, Prepare,
};
pub use batch_size::BatchSizes;
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
pub use weight_average::WeightAverage;
