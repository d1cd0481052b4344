//! Tests about the CPU, whatever the device of the others is.

mod devices;
mod exchange;
mod failure;
mod fake;
mod gather;
mod golden;
mod kept_memory;
mod memory;
mod message;
mod object;
mod reduce;
mod reducer;
mod reducer_failure;
mod shared_memory;
mod store;
mod subgroup;
mod sync_batch_norm;
mod warnings;
mod work;
