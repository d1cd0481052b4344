//! What splits texts into tokens.

use std::fmt;

use crate::{Result, TokenList};

/// Splits texts into tokens, from several threads at once.
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Appends the tokens of a text, in order.
    ///
    /// # Errors
    /// When the tokenizer cannot take the text.
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()>;

    /// Returns the tokenizer's kind and settings: two that describe themselves alike split every text alike. It is
    /// what caches are keyed by, and what an exported model keeps.
    fn describe(&self) -> serde_json::Value;
}
