//! Tests of computed numbers.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod cpu;
mod device;
mod embedding_sum;
mod layer_groups;
mod layers;
mod lstm;
mod model;
mod own_models;
mod residual;
mod seed;
mod weights;
