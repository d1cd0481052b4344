//! Tests of computed numbers, on one process and on several.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod activation;
mod attention_kernels;
mod coalesced;
mod context_attention;
mod convolution;
mod cpu;
mod cross_entropy;
mod cross_entropy_kernels;
mod distance;
mod dropped;
mod embedding_sum;
mod epilogues;
mod fused;
mod head_on_gpu;
mod images;
mod in_place;
mod linear;
mod lists;
mod max_pool;
mod norm_relu;
mod norm_residual;
mod optimizer_kernels;
mod regions;
#[path = "../common/rendezvous.rs"]
#[allow(dead_code, reason = "the other tests use the rest of it")]
mod rendezvous;
mod residual_inputs;
mod rotary;
mod rotary_kernels;
mod scaled_rows;
mod tied_embedding;
mod vocabulary_parallel;
mod weight_copies;
