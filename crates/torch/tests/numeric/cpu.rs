//! Tests about the CPU, whatever the device of the others is.

mod golden;
mod reduce;
mod reducer;
mod sharder;
mod steps;
mod sync_batch_norm;
