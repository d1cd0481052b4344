//! Tests of plans.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod golden;
mod properties;
