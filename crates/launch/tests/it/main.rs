//! What the launcher finds out about schedulers.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod scheduler;
