//! Tests about the CPU, whatever the device of the others is.

mod batch_size;
mod edges;
mod losses;
mod memory_format;
mod reproducible;
mod transformer;
