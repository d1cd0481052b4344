//! Tests of sharded training as data.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod settings;
