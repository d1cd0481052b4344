//! Tests of the facade as a program uses it, and of the self-test.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod derive;
#[cfg(feature = "learn")]
mod preludes;
mod selftest;
