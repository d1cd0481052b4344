//! GPT-2, BERT and Llama against transformers: names, values, losses, gradients, and what they write.

pub(crate) mod common;
mod folders;
mod forward;
mod generation;
mod more;
