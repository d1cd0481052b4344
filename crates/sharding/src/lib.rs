//! Plans of sharded training: which rank has which part of parameters, gradients, optimizer states, layers and
//! sequences, and which messages the ranks send.
//!
//! Nothing here has a tensor or a process group: plans are functions of names and shapes.
//!
//! - [`Sharding`] is what a user chooses: a [`Strategy`] and its options.
//! - [`settings`] reads what Accelerate and DeepSpeed write.
//! - [`Mesh`] is the grid of ranks, with its named axes and their groups.
//! - [`ShardingPlan`] has the units of a model, the slots of its parameters, and the [`Message`]s of a step, from
//!   which [`Volume`] and [`Memory`] follow.
//! - [`TensorPlan`] says which weights the ranks of a tensor group divide, and [`TensorPart`] what a rank has of one.
//! - [`TransformerStep`] has the messages and the activations of a transformer whose layers, sequences and stages ranks divide.
//! - [`device_map`] says which weights are on which GPU, in the host's memory and on disk.
//! - [`Inference`] and [`WeightFormat`] have the bytes of caches and quantised weights.
//! - [`pipeline`] has the schedules of pipeline parallelism, as tables of actions and messages.
//! - What a rank has of a tensor is a [`Region`](brigade_checkpoint::Region), whose `copy_to` is how a checkpoint of other
//!   ranks becomes it.
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
