//! What is held on the CPU alone: networks that consist of the same layers as smaller ones, and transformers' draws.

mod account;
mod context_parallel;
mod deferred;
mod dispatch;
mod expert_parallel;
mod generation;
mod golden;
mod kept_activations;
mod messages;
mod pipeline;
mod pretrained_memory;
mod recorded_steps;
mod residual_kernels;
mod resnet;
mod sharded;
mod tensor_parallel;
mod transformers_seed;
