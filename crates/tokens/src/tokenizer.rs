//! The tokenizer trait.

use std::fmt;

use crate::{Result, TokenList};

/// Splits texts into tokens, from several threads at once.
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Appends the tokens of a text, in order.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot process the text.
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()>;

    /// Returns the tokenizer's kind and settings. Tokenizers with equal descriptions split every text in the same way:
    /// caches use the description as a key, and exported models contain it.
    fn describe(&self) -> serde_json::Value;
}
