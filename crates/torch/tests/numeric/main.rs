//! Tests of computed numbers, and of what several processes do together.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod coalesced;
mod cpu;
mod cross_entropy;
mod distance;
mod dropped;
mod fused;
mod linear;
mod max_pool;
mod norm_relu;
mod rendezvous;
