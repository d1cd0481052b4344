//! Compiles the Rust examples of the pages in this folder, as documentation tests.

#[cfg(doctest)]
#[doc = include_str!("from-accelerate.md")]
pub struct FromAccelerate;
