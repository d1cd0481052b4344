//! Tests of the loaders.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod loader;
mod stream_loader;
