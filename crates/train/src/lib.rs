//! The Accelerator: one training loop for one process or many.
//!
//! A loop for one process becomes one for many with four changes: make an [`Accelerator`], let it
//! [`prepare`](Accelerator::prepare) the model, the optimizer and the loaders, call its
//! [`backward`](Accelerator::backward), and [`gather_for_metrics`](Accelerator::gather_for_metrics) what
//! is counted. Started alone, the same program runs as one process.

mod accelerator;
mod accumulate;
mod checkpoint;
mod connect;
mod dispatch;
mod error;
mod gather;
mod loader;
mod metrics;
mod model;
mod optim;
mod position;
mod prepare;
mod progress;
mod registry;
mod save;
mod scheduler;
mod scope;
mod split;

pub use accelerator::{Accelerator, AcceleratorBuilder};
pub use brigade_checkpoint::Value;
pub use brigade_torch::{Device, Kind, ReduceOp, ReducerOptions, Tensor, Tensors};
pub use checkpoint::{
    Checkpointed, HookError, HookHandle, LoadOptions, Loaded, ProjectConfiguration,
};
pub use dispatch::{Layout, Rebuild};
pub use error::{Error, Result};
pub use loader::{Batches, Epochs, PreparedLoader};
pub use metrics::Accuracy;
pub use model::{PreparedModel, PreparedModels};
pub use optim::{Adam, Optimizer, Sgd, Trainable};
pub use prepare::Prepare;
pub use progress::Progress;
pub use scheduler::{Scheduler, SchedulerState};
pub use split::Split;
