//! Sharded training as data: what the ranks of a job divide between them, how they are arranged, and which
//! messages they send. Nothing here has a tensor or a process group: plans are functions of names and shapes.
//!
//! - [`Sharding`] is what a user chooses: a [`Strategy`] and its options.
//! - [`settings`] reads what Accelerate and DeepSpeed write.
//! - [`Mesh`] is the grid of ranks, with its named axes and their groups.

mod error;
mod mesh;
pub mod settings;
mod strategy;

pub use error::ShardingError;
pub use mesh::{Axis, Mesh, MeshBuilder, MeshGroup};
pub use strategy::{MixedPrecision, Offload, ReduceGradients, Reshard, Sharding, Strategy, Units};
