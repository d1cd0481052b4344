//! Texts as batches: collators, loaders, and what they read.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod collate;
mod loaders;
#[cfg(feature = "parquet")]
mod parquet;
mod text_loaders;
