//! Tests about the CPU, whatever the device of the others is.

mod deferred;
mod dispatch;
mod experts;
mod feed_forward;
mod quantized;
mod rounding;
mod tensor_parallel;
