//! Tests about the CPU, whatever the device of the others is.

mod deferred;
mod experts;
mod rounding;
mod tensor_parallel;
