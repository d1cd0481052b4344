//! What trackers write into files, and send over TLS.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod files;
#[cfg(feature = "https")]
mod tls;
