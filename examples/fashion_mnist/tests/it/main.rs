//! The programs of this example, started as their users start them.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod example;
#[path = "../common/programs.rs"]
mod programs;
