//! List of tokens in one string.

use std::fmt;

/// The tokens of a text, in order: one string with the offsets of the tokens' ends, so that a token takes four bytes
/// besides its text, and no allocation.
///
/// ```
/// use brigade_tokens::TokenList;
///
/// let mut tokens = TokenList::new();
/// tokens.push("xxbos");
/// tokens.push("hello");
/// assert_eq!(tokens.len(), 2);
/// assert_eq!(tokens.iter().collect::<Vec<_>>(), ["xxbos", "hello"]);
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct TokenList {
    text: String,
    ends: Vec<usize>,
}

impl TokenList {
    /// Creates an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a list from tokens that are concatenated in `text`, with the offsets of their ends. Returns `None` if
    /// the ends do not match the text.
    pub(crate) fn from_parts(text: String, ends: Vec<usize>) -> Option<Self> {
        let fits = ends.is_sorted()
            && ends.last().copied().unwrap_or(0) == text.len()
            && ends.iter().all(|end| text.is_char_boundary(*end));
        fits.then_some(Self { text, ends })
    }

    /// Returns all tokens concatenated, and the offsets of their ends.
    pub(crate) fn as_parts(&self) -> (&str, &[usize]) {
        (&self.text, &self.ends)
    }

    /// Appends a token to the list.
    pub fn push(&mut self, token: &str) {
        self.text.push_str(token);
        self.ends.push(self.text.len());
    }

    /// Appends a token made of several pieces.
    pub fn push_pieces<'a>(&mut self, pieces: impl IntoIterator<Item = &'a str>) {
        pieces.into_iter().for_each(|piece| self.text.push_str(piece));
        self.ends.push(self.text.len());
    }

    /// Removes all tokens and keeps the memory.
    pub fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns `true` if the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the token with this index.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }

    /// Returns the tokens in order.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + DoubleEndedIterator {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

impl fmt::Debug for TokenList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a> Extend<&'a str> for TokenList {
    fn extend<I: IntoIterator<Item = &'a str>>(&mut self, tokens: I) {
        tokens.into_iter().for_each(|token| self.push(token));
    }
}

impl<'a> FromIterator<&'a str> for TokenList {
    fn from_iter<I: IntoIterator<Item = &'a str>>(tokens: I) -> Self {
        let mut list = Self::new();
        list.extend(tokens);
        list
    }
}
