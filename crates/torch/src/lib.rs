//! The border with libtorch: what tch leaves out.
//!
//! Stores, process groups, collectives, the gradient reducer of DistributedDataParallel, fused optimizer
//! kernels, and tensors that share memory with Rust vectors. Everything public is safe. All `unsafe`
//! code and all C++ of Brigade is in this crate; `src/bridge.rs` lists what crosses.

mod autograd;
mod backend;
mod bridge;
mod collective;
mod error;
pub mod fused;
mod group;
mod memory;
mod object;
mod random;
mod reducer;
mod roll_call;
mod store;
mod tensors;
mod work;

pub use autograd::{clear_gradient, grad_enabled, gradient, set_gradient};
pub use backend::{Backend, GlooDevice};
pub use collective::ReduceOp;
pub use error::{CollectiveError, Error, Fault};
pub use group::{DEFAULT_GROUP_TIMEOUT, GroupOptions, ProcessGroup};
pub use memory::{Element, as_bytes, as_slice, fill_bytes, from_vec, keep_freed_memory};
pub use random::{rng_state, set_rng_state};
pub use reducer::{Reducer, ReducerOptions};
pub use store::{DEFAULT_STORE_TIMEOUT, Store, TcpStore};
pub use tch::{Device, Kind, Tensor};
pub use tensors::Tensors;
pub use work::Work;

/// The result of the border's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The version of the libtorch this program was built with, such as `2.13.0`.
#[must_use]
pub fn libtorch_version() -> String {
    bridge::ffi::libtorch_version()
}

/// Whether this program was built with the feature `cuda`.
#[must_use]
pub fn cuda_compiled() -> bool {
    bridge::ffi::cuda_compiled()
}
