//! The trait of tokenizers.

use std::fmt;

use crate::{Result, TokenList};

/// A tokenizer: splits texts into tokens. It may be called by several threads at the same time.
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Appends the tokens of a text, in order.
    ///
    /// # Errors
    /// Fails if the tokenizer rejects the text.
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()>;

    /// Returns a description of the tokenizer: its kind and settings. Tokenizers with equal descriptions must split
    /// every text in the same way. The description is part of the keys of caches and of exported models.
    fn describe(&self) -> serde_json::Value;
}
