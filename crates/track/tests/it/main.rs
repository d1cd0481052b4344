//! Tests of trackers that write files, and of the one that uses TLS.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod files;
#[cfg(feature = "https")]
mod tls;
