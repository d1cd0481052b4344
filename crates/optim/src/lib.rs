//! Optimizers: arithmetic over named parameters, and the schedulers that set their learning rates.
//!
//! An [`Optimizer`] is built by [`AdamW`], [`Sgd`] and the others from anything
//! [`Trainable`](brigade_torch::Trainable): a model, tch's `VarStore`, or a list of
//! [`NamedTensor`](brigade_torch::NamedTensor)s. Its rule steps all parameters of a group at once, its
//! parameters lie in [groups](Group), its state has PyTorch's names. A [`Scheduler`] moves the learning rate by a
//! [`LrSchedule`](brigade_schedule::LrSchedule): one of [`brigade_schedule`]'s curves, or any closure.
//! Nothing here knows of ranks; `brigade-train` puts a wrapper around what it prepares.
//!
//! ```
//! use brigade_optim::{Adam, Scheduler};
//! use brigade_torch::NamedTensor;
//! use tch::{Device, Kind, Tensor};
//!
//! // y = 3 x - 1 from eight points.
//! let x = Tensor::arange(8, (Kind::Float, Device::Cpu)) / 8.0;
//! let y = &x * 3.0 - 1.0;
//! let names = ["slope", "offset"];
//! let parameters = names.map(|name| NamedTensor {
//!     name: name.to_owned(),
//!     tensor: Tensor::zeros([1], (Kind::Float, Device::Cpu)).set_requires_grad(true),
//! });
//! let mut optimizer = Adam::default().lr(0.1).build(&parameters)?;
//! let mut scheduler = Scheduler::new(&optimizer, |step: u64| 0.1 * 0.99f64.powi(step as i32));
//! for _ in 0..300 {
//!     let [slope, offset] = &parameters;
//!     let loss = (&slope.tensor * &x + &offset.tensor - &y).square().mean(Kind::Float);
//!     optimizer.zero_grad()?;
//!     loss.backward();
//!     optimizer.step()?;
//!     scheduler.step()?;
//! }
//! assert!((parameters[0].tensor.double_value(&[0]) - 3.0).abs() < 0.05);
//! assert!((parameters[1].tensor.double_value(&[0]) + 1.0).abs() < 0.05);
//! # Ok::<(), brigade_torch::Error>(())
//! ```

mod builder;
mod check;
mod device_scalars;
mod group;
mod import;
mod inner;
mod lookahead;
mod optimizer;
mod options;
mod param_state;
mod rule;
#[doc(hidden)]
pub mod rules;
mod scheduler;
mod shards;
mod state;

pub use device_scalars::DeviceScalars;
pub use group::{Group, ParameterGroup};
pub use lookahead::Lookahead;
pub use optimizer::{Optimizer, OptimizerBuilder, OptimizerSettings, Overrides};
pub use rule::{Rule, ShardedStep, Slots, Step};
#[doc(inline)]
pub use rules::*;
pub use scheduler::{Scheduler, SchedulerState};
pub use shards::{RankSums, ReducedSums, Shards};
pub use state::{GroupState, OptimizerState, ParameterState, StateMismatch};
