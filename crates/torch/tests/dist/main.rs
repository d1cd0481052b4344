//! The border with libtorch, used by several processes.

// clippy.toml allows it in tests, but does not know their helpers.
#![allow(clippy::unwrap_used)]

mod coalesced;
mod cross_entropy;
mod devices;
mod exchange;
mod failure;
mod fake;
mod fused;
mod gather;
mod golden;
mod kept_memory;
mod linear;
mod max_pool;
mod memory;
mod message;
mod norm_relu;
mod object;
mod reduce;
mod reducer;
mod reducer_failure;
mod rendezvous;
mod shared_memory;
mod store;
mod subgroup;
mod sync_batch_norm;
mod warnings;
mod work;
