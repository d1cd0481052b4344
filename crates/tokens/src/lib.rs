//! Texts as tokens, without tensors: where texts come from, how they are split, and the numbers that tokens get.
//!
//! A [`Tokenizer`] splits a text into a [`TokenList`].

mod error;
mod token_list;
mod tokenizer;

pub use error::{Error, Result};
pub use token_list::TokenList;
pub use tokenizer::Tokenizer;
