//! Tests of a whole process: its threads, and its children by `fork`.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod forked;
mod threads;
