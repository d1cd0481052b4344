//! GPT-2, BERT, Llama and Mixtral against transformers: names, values, losses, gradients, and what they write.

pub(crate) mod common;
mod continuations;
mod folders;
mod forward;
mod generation;
mod mixtral;
mod more;
mod quantized;
