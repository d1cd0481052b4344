//! Tests about the CPU, whatever the device of the others is.

mod deferred;
mod rounding;
mod tensor_parallel;
