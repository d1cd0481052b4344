//! Plans of sharded training: which rank has which part of parameters, gradients, optimizer states, layers and
//! sequences, and which messages the ranks send.
//!
//! This crate has neither tensors nor process groups: plans are functions of names and shapes.
//!
//! - [`Sharding`]: a sharding [`Strategy`] (ZeRO-1 to ZeRO-3, hybrid) and its options, as a user chooses them.
//! - [`settings`]: reads configurations of Accelerate, DeepSpeed and Megatron-LM.
//! - [`Mesh`]: the grid of ranks, with its named axes and their groups.
//! - [`ShardingPlan`]: the units of a model, the slots of its parameters, and the [`Message`]s of a step, from which
//!   [`Volume`] and [`Memory`] follow.
//! - [`TensorPlan`]: the weights that the ranks of a tensor group divide; [`TensorPart`]: a rank's part of one weight.
//! - [`TransformerStep`]: the messages and the activation memory of a transformer whose layers, sequences and stages
//!   are divided among ranks.
//! - [`device_map`]: the placement of weights on GPUs, in the host's memory and on disk.
//! - [`Inference`] and [`WeightFormat`]: the bytes of key-value caches and quantised weights.
//! - [`pipeline`]: schedules of pipeline parallelism, as tables of actions and messages.
//! - A rank's part of a tensor is a [`Region`](brigade_checkpoint::Region), whose `copy_to` computes the copies from
//!   the parts in a checkpoint of another number of ranks.
//!
//! ```
//! use brigade_checkpoint::{Dtype, Region};
//! use brigade_sharding::{Parameter, Sharding, ShardingPlan};
//!
//! let parameters = [
//!     Parameter::new("embedding.weight", &[100, 8], Dtype::F32),
//!     Parameter::new("h.0.weight", &[8, 8], Dtype::F32).in_unit("h.0"),
//!     Parameter::new("h.0.bias", &[8], Dtype::F32).in_unit("h.0"),
//!     Parameter::new("h.1.weight", &[8, 8], Dtype::F32).in_unit("h.1"),
//! ];
//! let sharding = Sharding::zero3();
//! let plan = ShardingPlan::new(&parameters, &sharding, &sharding.mesh(4)?)?;
//! let units: Vec<_> = plan.units().iter().map(|unit| unit.title()).collect();
//! assert_eq!(units, ["the root", "h.0", "h.1"]);
//!
//! let bias = &plan.units()[1].parameters[1];
//! assert_eq!(bias.slot.rows_of(3), 6..8);
//! assert_eq!(bias.slot.offset, 8 * 8 * 4);
//! # Ok::<(), brigade_sharding::ShardingError>(())
//! ```

pub mod byte_size;
mod description;
pub mod device_map;
mod error;
mod inference;
mod memory;
mod mesh;
mod message;
mod note;
mod parameter;
pub mod pipeline;
mod plan;
mod sequence_part;
pub mod settings;
mod slot;
mod strategy;
mod tensor_part;
mod tensor_plan;
#[cfg(test)]
mod tests;
mod text;
mod transformer;
mod unit;
mod volume;
mod weight_format;

pub use description::PlanDifference;
pub use error::ShardingError;
pub use inference::{Inference, WeightTransfer};
pub use memory::{Memory, Workload};
pub use mesh::{Axis, Mesh, MeshBuilder, MeshGroup};
pub use message::{Message, Operation, Peers, Phase};
pub use note::Note;
pub use parameter::Parameter;
pub use plan::{ShardingPlan, Unit, UnitParameter};
pub use sequence_part::{ContextMethod, SequencePart};
pub use slot::{ALIGNMENT, Slot};
pub use strategy::{MixedPrecision, Offload, ReduceGradients, Reshard, Sharding, Strategy, Units};
pub use tensor_part::TensorPart;
pub use tensor_plan::{Heads, TensorPlan, TensorStyle};
pub use transformer::{AxisMessages, ExpertStep, TransformerStep, message_formulas};
pub use volume::{Traffic, Volume};
pub use weight_format::WeightFormat;
