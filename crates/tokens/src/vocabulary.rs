//! Vocabularies: the map between tokens and ids.

mod counts;
mod file;

use std::collections::{HashMap, HashSet};
use std::fmt;

pub use self::counts::TokenCounts;
use brigade_rank_env::text::counted;

use crate::{Error, Result, TokenList};

/// fastai's special tokens, in the order in which they begin a vocabulary: unknown token, padding, beginning and end of
/// a text, beginning of a field, repeated character, repeated word, word in capitals, capitalised word.
pub const SPECIAL_TOKENS: [&str; 9] =
    ["xxunk", "xxpad", "xxbos", "xxeos", "xxfld", "xxrep", "xxwrep", "xxup", "xxmaj"];

/// Token that pads a vocabulary to a multiple of 8.
const FILLER: &str = "xxfake";
const UNKNOWN: &str = "xxunk";
const ALIGNED: usize = 8;

/// Options of a vocabulary: minimum number of occurrences, maximum size and special tokens, as in fastai's
/// `make_vocab`.
///
/// ```
/// use brigade_tokens::{TokenCounts, VocabularyOptions};
///
/// let mut counts = TokenCounts::new();
/// counts.add(0, ["xxbos", "to", "be", "or", "not", "to", "be"]);
/// let vocabulary = VocabularyOptions::new().min_freq(2).build(&counts);
/// assert_eq!(vocabulary.id("to"), Some(9));
/// assert_eq!((vocabulary.id("or"), vocabulary.unknown()), (None, Some(0)));
/// assert_eq!(vocabulary.len(), 16);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabularyOptions {
    max_size: usize,
    min_freq: u64,
    special_tokens: Vec<String>,
}

impl Default for VocabularyOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl VocabularyOptions {
    /// Creates options with fastai's defaults: at most 60,000 tokens that occur at least 3 times, and the
    /// [`SPECIAL_TOKENS`].
    #[must_use]
    pub fn new() -> Self {
        Self {
            max_size: 60_000,
            min_freq: 3,
            special_tokens: SPECIAL_TOKENS.map(str::to_owned).to_vec(),
        }
    }

    /// Sets the maximum vocabulary size, including special tokens but not fillers. Defaults to 60,000.
    #[must_use]
    pub fn max_size(mut self, tokens: usize) -> Self {
        self.max_size = tokens;
        self
    }

    /// Sets the minimum number of occurrences of a token in the vocabulary. Defaults to 3.
    #[must_use]
    pub fn min_freq(mut self, times: u64) -> Self {
        self.min_freq = times;
        self
    }

    /// Sets the special tokens, which come first in the vocabulary even if they do not occur in the texts. Defaults to
    /// [`SPECIAL_TOKENS`].
    #[must_use]
    pub fn special_tokens<T: Into<String>>(mut self, tokens: impl IntoIterator<Item = T>) -> Self {
        self.special_tokens = tokens.into_iter().map(Into::into).collect();
        self
    }

    /// Builds the vocabulary: the special tokens, then the most common tokens (of equally common ones, the one that
    /// occurred first), then 1 to 8 fillers `xxfake` up to the next multiple of 8. The ids of fillers do not occur in
    /// texts.
    #[must_use]
    pub fn build(&self, counts: &TokenCounts) -> Vocabulary {
        let mut seen = HashSet::new();
        let special = self.special_tokens.iter().map(String::as_str);
        let mut tokens: Vec<&str> = special.filter(|token| seen.insert(*token)).collect();
        let common = counts.most_common();
        let common = common.into_iter().take(self.max_size);
        let common = common.take_while(|(_, count)| *count >= self.min_freq);
        tokens.extend(common.map(|(token, _)| token).filter(|token| !seen.contains(token)));
        tokens.truncate(self.max_size);
        let fillers = ALIGNED - tokens.len() % ALIGNED;
        tokens.extend([FILLER].repeat(fillers));
        Vocabulary::number(tokens.into_iter().map(Into::into).collect(), Some(FILLER))
    }

    /// Returns a description of the options, for keys of caches.
    #[must_use]
    pub fn describe(&self) -> serde_json::Value {
        serde_json::json!({
            "max_size": self.max_size,
            "min_freq": self.min_freq,
            "special_tokens": self.special_tokens,
        })
    }
}

/// A vocabulary: the map between tokens and ids, which count from 0.
///
/// A token that is not in the vocabulary gets the id of the unknown token: `xxunk` if the vocabulary has it, or the one
/// set by [`with_unknown`](Self::with_unknown). fastai gives such tokens the id 0, whatever token that is.
///
/// ```
/// use brigade_tokens::{TokenList, Vocabulary};
///
/// let vocabulary = Vocabulary::new(["xxunk", "xxpad", "film", "good"])?;
/// let tokens: TokenList = ["good", "movie"].into_iter().collect();
/// assert_eq!(vocabulary.ids(&tokens)?, [3, 0]);
/// assert_eq!(vocabulary.tokens_of(&[3, 2])?.collect::<Vec<_>>(), ["good", "film"]);
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
#[derive(Clone)]
pub struct Vocabulary {
    tokens: Vec<Box<str>>,
    ids: HashMap<Box<str>, u32, foldhash::fast::FixedState>,
    unknown: Option<u32>,
    /// Token of the fillers, which no token of a text matches.
    filler: Option<Box<str>>,
}

impl Vocabulary {
    /// Creates a vocabulary of tokens, whose ids are their positions. Of equal tokens, the last one is used, and
    /// `xxfake` is an ordinary token, as in fastai for a vocabulary that is passed in.
    ///
    /// # Errors
    /// Fails if there are more than 2^32 - 1 tokens.
    pub fn new<T: Into<Box<str>>>(tokens: impl IntoIterator<Item = T>) -> Result<Self> {
        let tokens: Vec<Box<str>> = tokens.into_iter().map(Into::into).collect();
        if u32::try_from(tokens.len()).is_err() {
            return Err(Error::InvalidArgument(format!(
                "a vocabulary of {} tokens is too large: numbers of tokens have 32 bits",
                tokens.len()
            )));
        }
        Ok(Self::number(tokens, None))
    }

    /// Creates the vocabulary. The number of tokens fits `u32`.
    fn number(tokens: Vec<Box<str>>, filler: Option<&str>) -> Self {
        let numbered = tokens.iter().zip(0_u32..);
        let known = numbered.filter(|(token, _)| filler != Some(&***token));
        let ids: HashMap<_, _, _> = known.map(|(token, id)| (token.clone(), id)).collect();
        let unknown = ids.get(UNKNOWN).copied();
        Self { tokens, ids, unknown, filler: filler.map(Into::into) }
    }

    /// Sets the unknown token, which stands for tokens that are not in the vocabulary.
    ///
    /// # Errors
    /// Fails if the token is not in the vocabulary.
    pub fn with_unknown(mut self, token: &str) -> Result<Self> {
        self.unknown = Some(self.id(token).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "{token:?} cannot be the unknown token: the vocabulary does not have it"
            ))
        })?);
        Ok(self)
    }

    /// Returns the vocabulary size, including fillers: the number of rows of an embedding.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns `true` if there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the id of a token, if the vocabulary has it.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    /// Returns the token with an id, if the vocabulary has it.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(|token| &**token)
    }

    /// Returns the id of the unknown token, if there is one.
    #[must_use]
    pub fn unknown(&self) -> Option<u32> {
        self.unknown
    }

    /// Returns the tokens in the order of their ids.
    #[must_use]
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = &str> + DoubleEndedIterator {
        self.tokens.iter().map(|token| &**token)
    }

    /// Returns the id of a token, or of the unknown token if the vocabulary lacks it.
    ///
    /// # Errors
    /// Fails if the vocabulary has neither.
    pub fn id_or_unknown(&self, token: &str) -> Result<u32> {
        self.id(token)
            .or(self.unknown)
            .ok_or_else(|| Error::UnknownToken { token: token.chars().take(MAX_SHOWN).collect() })
    }

    /// Returns the ids of a text's tokens, with the unknown token for those that are not in the vocabulary.
    ///
    /// # Errors
    /// Fails if the vocabulary has neither a token nor an unknown token.
    pub fn ids(&self, tokens: &TokenList) -> Result<Vec<u32>> {
        tokens.iter().map(|token| self.id_or_unknown(token)).collect()
    }

    /// Returns the tokens with these ids.
    ///
    /// # Errors
    /// Fails if an id is not below the vocabulary size.
    pub fn tokens_of<'a>(&'a self, ids: &'a [u32]) -> Result<impl Iterator<Item = &'a str>> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.len()) {
            return Err(Error::InvalidArgument(format!(
                "the vocabulary of {} has none with number {id}",
                counted(self.len(), "token")
            )));
        }
        Ok(ids.iter().filter_map(|id| self.token(*id)))
    }
}

impl PartialEq for Vocabulary {
    fn eq(&self, other: &Self) -> bool {
        (&self.tokens, self.unknown, &self.filler) == (&other.tokens, other.unknown, &other.filler)
    }
}

impl Eq for Vocabulary {}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("len", &self.len())
            .field("unknown", &self.unknown)
            .field("tokens", &&self.tokens[..self.len().min(16)])
            .finish_non_exhaustive()
    }
}

/// Maximum number of characters of a token in a message.
const MAX_SHOWN: usize = 80;
