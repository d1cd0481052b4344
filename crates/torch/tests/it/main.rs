//! Stores and process groups: what several processes send each other, and what each sees when one fails; also a whole
//! process: its memory, its threads, and its children by `fork`. No number here depends on how a processor rounds.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod devices;
mod exchange;
mod failure;
mod fake;
mod forked;
mod gather;
mod gloo_loop;
mod kept_memory;
mod memory;
mod message;
mod object;
mod object_cache;
mod reducer_failure;
#[path = "../common/rendezvous.rs"]
mod rendezvous;
mod shared_memory;
mod store;
mod subgroup;
mod threads;
mod warnings;
mod weight_ring;
mod work;
