//! spaCy's rule-based tokenizer of English.

mod affixes;
pub(crate) mod characters;
mod phrases;
mod url;

use std::collections::HashMap;
use std::fmt;

use serde_json::{Value, json};

use self::characters::{CHARACTERS, SPACE, SPLITS};
use self::phrases::Phrases;
use crate::{Error, Result, TokenList, Tokenizer};

/// Splits English texts as `spacy.blank("en")` of spaCy 3.8 does: at spaces, then at prefixes, suffixes and infixes,
/// with exceptions such as `don't` and `:-)` and with URLs as single tokens.
///
/// The tokens are parts of the text, in order; only single spaces between words belong to no token. The time is linear
/// in the length of the text. A tokenizer has no mutable state, so that threads can share it without locks.
///
/// ```
/// use brigade_tokens::{English, TokenList, Tokenizer};
///
/// let mut tokens = TokenList::new();
/// English::new().tokenize("Don't panic (see example.org)  :-)", &mut tokens)?;
/// let expected = ["Do", "n't", "panic", "(", "see", "example.org", ")", " ", ":-)"];
/// assert_eq!(tokens.iter().collect::<Vec<_>>(), expected);
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
pub struct English {
    words: HashMap<Box<str>, Word, foldhash::fast::FixedState>,
    /// Lengths of the words that begin with each byte, as a set of bits: most texts need no look-up.
    lengths: Box<[u64; 256]>,
    /// Length of the longest word in bytes.
    longest: usize,
    phrases: Phrases,
    special_cases: Vec<Vec<String>>,
}

/// Text with an entry in one of the tables.
#[derive(Debug, Default)]
struct Word {
    /// Tokens of a special case, by their lengths in bytes. Empty if it is not a special case.
    pieces: Box<[(u32, Symbol)]>,
    symbol: Symbol,
}

/// Number of a token that occurs in [`Phrases`], or 0 for all others.
type Symbol = u32;

/// Piece of the text, from its first byte to that after its last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    start: u32,
    end: u32,
    symbol: Symbol,
}

impl Token {
    /// Returns the token's piece of the text.
    #[inline]
    pub(crate) fn of(self, text: &str) -> &str {
        &text[self.start as usize..self.end as usize]
    }
}

impl Default for English {
    fn default() -> Self {
        Self::new()
    }
}

impl English {
    /// Creates the tokenizer with spaCy's exceptions.
    #[must_use]
    pub fn new() -> Self {
        Self::build(Vec::new())
    }

    /// Adds special cases: each is a list of tokens, into which the text that they form together is split (spaCy's
    /// `add_special_case`). If several have the same text, the last one is used.
    ///
    /// ```
    /// use brigade_tokens::{English, TokenList, Tokenizer};
    ///
    /// let english = English::new().with_special_cases([["gim", "me"]])?;
    /// let mut tokens = TokenList::new();
    /// english.tokenize("gimme!", &mut tokens)?;
    /// assert_eq!(tokens.iter().collect::<Vec<_>>(), ["gim", "me", "!"]);
    /// # Ok::<(), brigade_tokens::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails if a token is empty.
    pub fn with_special_cases<T: Into<String>>(
        self,
        cases: impl IntoIterator<Item = impl IntoIterator<Item = T>>,
    ) -> Result<Self> {
        let mut special_cases = self.special_cases;
        special_cases.extend(cases.into_iter().map(|it| it.into_iter().map(Into::into).collect()));
        if let Some(case) =
            special_cases.iter().find(|case| case.is_empty() || case.iter().any(String::is_empty))
        {
            let message = format!(
                "the special case {case:?} has an empty token: give tokens of a character or more"
            );
            return Err(Error::InvalidArgument(message));
        }
        Ok(Self::build(special_cases))
    }

    fn build(special_cases: Vec<Vec<String>>) -> Self {
        let mut english = Self {
            words: HashMap::default(),
            lengths: Box::new([0; 256]),
            longest: 0,
            phrases: Phrases::new(),
            special_cases,
        };
        // The table begins with comments.
        let lines = include_str!("english/exceptions.txt").lines().filter(|it| it.starts_with('['));
        let exceptions = lines.filter_map(|line| serde_json::from_str::<Vec<String>>(line).ok());
        for case in exceptions.chain(english.special_cases.clone()) {
            let pieces = case.iter().map(|it| (length(it), 0)).collect();
            english.words.insert(case.concat().into(), Word { pieces, symbol: 0 });
        }
        let texts: Vec<Box<str>> = english.words.keys().cloned().collect();
        let mut symbols: HashMap<String, Symbol> = HashMap::new();
        for text in &texts {
            let apart = affixes::prefix(text) > 0
                || affixes::suffix(text) > 0
                || affixes::infix(text, 0).is_some()
                || text.contains(' ');
            let tokens = english.split_with(text, false);
            // A token that is not split anyway need not be found.
            if !apart || (tokens.len() == 1 && english.words[text].pieces.len() == 1) {
                continue;
            }
            let symbol = |token: &Token| {
                let next = Symbol::try_from(symbols.len() + 1).unwrap_or_default();
                *symbols.entry(token.of(text).to_owned()).or_insert(next)
            };
            let sequence: Vec<Symbol> = tokens.iter().map(symbol).collect();
            english.phrases.insert(&sequence);
        }
        for (text, symbol) in &symbols {
            english.words.entry(text.as_str().into()).or_default().symbol = *symbol;
        }
        for text in &texts {
            let Some(word) = english.words.get_mut(text) else { continue };
            let mut rest = &**text;
            for (bytes, symbol) in &mut word.pieces {
                let (piece, after) = rest.split_at(*bytes as usize);
                *symbol = symbols.get(piece).copied().unwrap_or_default();
                rest = after;
            }
        }
        for word in english.words.keys() {
            let first = word.bytes().next().map_or(0, usize::from);
            english.lengths[first] |= length_bit(word);
            english.longest = english.longest.max(word.len());
        }
        english
    }

    /// Returns the tokens of a text.
    ///
    /// # Errors
    /// Fails if it has 4 GiB or more.
    pub(crate) fn split(&self, text: &str) -> Result<Vec<Token>> {
        if u32::try_from(text.len()).is_err() {
            let message =
                format!("a text has {} bytes, and 4 GiB is too many for one: split it", text.len());
            return Err(Error::InvalidArgument(message));
        }
        let mut tokens = self.split_with(text, true);
        self.join_special_cases(text, &mut tokens);
        Ok(tokens)
    }

    /// Tokenizes without the final pass over the tokens, and with or without special cases.
    fn split_with(&self, text: &str, special_cases: bool) -> Vec<Token> {
        // English has a token for each 4 to 5 bytes.
        let tokens = Vec::with_capacity(text.len() / 4 + 1);
        let mut pass = Pass { english: self, text, tokens, suffixes: Vec::new(), special_cases };
        let characters = &*CHARACTERS;
        let Some(first) = text.chars().next() else { return pass.tokens };
        let mut in_space = characters.is(first, SPACE);
        let (mut start, mut classes) = (0, 0);
        for (at, character) in text.char_indices() {
            let class = characters.of(character);
            if (class & SPACE != 0) != in_space {
                if start < at {
                    pass.span(start, at, !in_space && classes & SPLITS != 0);
                }
                // One space after a word is not part of a token.
                start = if character == ' ' { at + 1 } else { at };
                in_space = !in_space;
                classes = 0;
            }
            classes |= class;
        }
        if start < text.len() {
            pass.span(start, text.len(), !in_space && classes & SPLITS != 0);
        }
        pass.tokens
    }

    fn word(&self, text: &str) -> Option<&Word> {
        let lengths = self.lengths[usize::from(*text.as_bytes().first()?)];
        let known = text.len() <= self.longest && lengths & length_bit(text) != 0;
        if known { self.words.get(text) } else { None }
    }

    fn special_case(&self, text: &str) -> Option<&Word> {
        self.word(text).filter(|it| !it.pieces.is_empty())
    }

    /// Joins the tokens of special cases that were split as affixes: `foo-a.` has the token `a.`.
    fn join_special_cases(&self, text: &str, tokens: &mut Vec<Token>) {
        let spans = self.phrases.find(tokens);
        if spans.is_empty() {
            return;
        }
        let mut joined = Vec::with_capacity(tokens.len() + spans.len());
        let mut done = 0;
        for (start, end) in spans {
            let (from, to) = (tokens[start].start, tokens[end - 1].end);
            // Not if the text has a space between the tokens.
            let Some(word) = self.special_case(&text[from as usize..to as usize]) else { continue };
            joined.extend_from_slice(&tokens[done..start]);
            push_pieces(&mut joined, from, &word.pieces);
            done = end;
        }
        if done > 0 {
            joined.extend_from_slice(&tokens[done..]);
            *tokens = joined;
        }
    }
}

impl Tokenizer for English {
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
        self.split(text)?.iter().for_each(|token| tokens.push(token.of(text)));
        Ok(())
    }

    fn describe(&self) -> Value {
        json!({ "kind": "english", "spacy": "3.8", "special_cases": self.special_cases })
    }
}

impl fmt::Debug for English {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { words, special_cases, .. } = self;
        f.debug_struct("English")
            .field("words", &words.len())
            .field("special_cases", special_cases)
            .finish_non_exhaustive()
    }
}

/// State of the tokenization of one text.
struct Pass<'a> {
    english: &'a English,
    text: &'a str,
    tokens: Vec<Token>,
    /// Start offsets of the suffixes, with the last suffix first.
    suffixes: Vec<usize>,
    special_cases: bool,
}

impl Pass<'_> {
    /// Tokenizes a run of spaces or of other characters.
    #[inline]
    fn span(&mut self, start: usize, end: usize, may_split: bool) {
        if may_split { self.affixes(start, end) } else { self.push(start, end) }
    }

    /// Appends a token, or the tokens of a special case.
    #[inline]
    fn push(&mut self, start: usize, end: usize) {
        match self.english.word(&self.text[start..end]) {
            Some(word) if self.special_cases && !word.pieces.is_empty() => {
                push_pieces(&mut self.tokens, start as u32, &word.pieces);
            }
            word => self.push_token(start, end, word.map_or(0, |it| it.symbol)),
        }
    }

    fn push_affix(&mut self, start: usize, end: usize) {
        let symbol = self.english.word(&self.text[start..end]).map_or(0, |it| it.symbol);
        self.push_token(start, end, symbol);
    }

    #[inline]
    fn push_token(&mut self, start: usize, end: usize, symbol: Symbol) {
        // `split` refuses longer texts.
        self.tokens.push(Token { start: start as u32, end: end as u32, symbol });
    }

    fn is_special_case(&self, start: usize, end: usize) -> bool {
        self.special_cases
            && start < end
            && self.english.special_case(&self.text[start..end]).is_some()
    }

    /// Splits off prefixes and suffixes until nothing changes or a special case is left, then splits the rest.
    fn affixes(&mut self, start: usize, end: usize) {
        let text = self.text;
        let (mut start, mut end, span_end) = (start, end, end);
        let mut length = 0;
        while start < end && end - start != length && !self.is_special_case(start, end) {
            length = end - start;
            let prefix = affixes::prefix(&text[start..end]);
            if prefix > 0 && self.is_special_case(start + prefix, end) {
                self.push_affix(start, start + prefix);
                start += prefix;
                break;
            }
            let suffix = affixes::suffix(&text[start + prefix..end]);
            if suffix > 0 && self.is_special_case(start, end - suffix) {
                end -= suffix;
                self.suffixes.push(end);
                break;
            }
            if prefix > 0 {
                self.push_affix(start, start + prefix);
                start += prefix;
            }
            if suffix > 0 {
                end -= suffix;
                self.suffixes.push(end);
            }
        }
        self.middle(start, end);
        let mut suffixes = std::mem::take(&mut self.suffixes);
        for (place, suffix) in suffixes.iter().enumerate().rev() {
            let after = if place == 0 { span_end } else { suffixes[place - 1] };
            self.push_affix(*suffix, after);
        }
        suffixes.clear();
        self.suffixes = suffixes;
    }

    /// Splits text that has neither prefix nor suffix.
    fn middle(&mut self, start: usize, end: usize) {
        let text = &self.text[start..end];
        if text.is_empty() {
            return;
        }
        if self.is_special_case(start, end) || url::is_url(text) {
            self.push(start, end);
            return;
        }
        let mut from = 0;
        let mut search = 0;
        while let Some((infix, after)) = affixes::infix(text, search) {
            search = after;
            if infix == 0 {
                continue;
            }
            if infix > from {
                self.push_affix(start + from, start + infix);
            }
            self.push_affix(start + infix, start + after);
            from = after;
        }
        if from < text.len() {
            self.push_affix(start + from, end);
        }
    }
}

fn push_pieces(tokens: &mut Vec<Token>, start: u32, pieces: &[(u32, Symbol)]) {
    let mut start = start;
    for (bytes, symbol) in pieces {
        tokens.push(Token { start, end: start + bytes, symbol: *symbol });
        start += bytes;
    }
}

/// Returns the bit of a text's length. All lengths of 63 bytes and more share one bit.
fn length_bit(text: &str) -> u64 {
    1 << text.len().min(63)
}

fn length(text: &str) -> u32 {
    u32::try_from(text.len()).unwrap_or(u32::MAX)
}
