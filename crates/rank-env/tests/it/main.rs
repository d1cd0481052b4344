//! The place of a process among others, as its environment tells it.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod contract;
mod record;
mod schedulers;
