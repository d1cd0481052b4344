//! Tests of computed numbers.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod accumulate;
mod checkpoint;
mod clipping;
mod comm_hooks;
mod cpu;
mod device;
#[path = "../common/fsdp2_net.rs"]
mod fsdp2_net;
mod metrics;
#[path = "../common/net.rs"]
mod net;
mod own_models;
mod pipeline;
mod pipeline_messages;
mod precision;
mod products;
#[path = "../common/resume.rs"]
mod resume;
mod scaler;
mod sharding;
mod sync_batch_norm;
mod tensor_parallel;
mod torch_parallel;
mod uneven;
mod weight_average;
mod weighted;
