//! Tests about the CPU, whatever the device of the others is.

mod edges;
mod memory_format;
mod reproducible;
mod transformer;
