//! Optimizers over named parameters, and schedulers that set their learning rates.
//!
//! An [`Optimizer`] is built by [`AdamW`], [`Sgd`] and the others from anything
//! [`Trainable`](brigade_torch::Trainable): a model, tch's `VarStore`, or a list of
//! [`NamedTensor`](brigade_torch::NamedTensor)s. Parameters are divided into [groups](Group), all parameters of a group
//! are stepped at once, and the state has PyTorch's names. A [`Scheduler`] sets the learning rate from a
//! [`LrSchedule`](brigade_schedule::LrSchedule): one of [`brigade_schedule`]'s curves, or any closure. Only the sharded
//! steps ([`Rule::step_shards`]) depend on ranks; `brigade-train` wraps the optimizers that it prepares.
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
//!
//! # How an optimizer steps
//!
//! [`Optimizer::step`] runs the rule, group by group. A rule (`rules/`, or a program's own [`Rule`]) is arithmetic
//! over named slots of state. Slots (`param_state.rs`), groups, hyperparameters and files are common to all rules
//! (`inner.rs`, `state.rs`). States of PyTorch are converted in `crates/checkpoint/src/torch_optimizer.rs`, for
//! `load_pytorch` and for `brigade checkpoint convert` alike. A [`Scheduler`] holds a handle of the optimizer and
//! sets the learning rates of its groups by a function of the step, so a checkpoint keeps only the step.
//!
//! On a CPU a step is one pass over flat memory by our own loops (`crates/torch/cpp/step_kernels.cpp`), parallel over
//! the elements of all parameters together (`step_ranges.h`). On other devices Adam, AdamW and SGD use libtorch's fused
//! kernels (`optimizer.cpp`), the others its foreach operations (`flat.cpp`, `foreach.cpp`): one step of all parameters
//! of a device and type, in as many operations for a hundred parameters as for one, none of which reads a value back.
//! `Scratch` is one block of memory with a place for each parameter, so most operations run over the block; learning
//! rates that differ by parameter (LAMB, LARS, Adafactor) multiply its rows. Adafactor reduces each matrix by itself;
//! Muon multiplies all matrices of one shape in one batched product.
//!
//! [`Optimizer::step_with`] takes the learning rate, the scale of gradients and `found_inf` as tensors
//! ([`DeviceScalars`]). Steps are then counted on the device, by a tensor that parameters with the same history share.
//! A skipped step adds -0 and multiplies by 1, so weights and states keep their bits. One set of formulas computes a
//! rule's scalars on the host and on the device (`Number`). On a CPU the same operations run, which is how they are
//! tested; tests count operations with the profiler.

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
mod parts;
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
