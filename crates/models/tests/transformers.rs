//! GPT-2, BERT and Llama against transformers: names, values, losses, gradients, and what they write.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "of the tests of other models")]
mod fill;

#[path = "transformers/common.rs"]
mod common;
#[path = "transformers/folders.rs"]
mod folders;
#[path = "transformers/forward.rs"]
mod forward;
#[path = "transformers/generation.rs"]
mod generation;
#[path = "transformers/more.rs"]
mod more;
