//! The rendezvous over loopback, and in a simulation.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod guarded;
mod simulated;
mod simulation;
