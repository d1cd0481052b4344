//! Tokenized texts of a source.

mod builder;
mod store;

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub(crate) use self::builder::{Builder, Key, Sink, content_of, widened};
pub(crate) use self::store::{Store, Width};
use brigade_rank_env::text::counted;

use crate::{
    Error, ParallelOptions, Result, TextSource, TokenCounts, TokenList, Tokenizer, Vocabulary,
};

/// The tokens of all texts of a source: a list of the distinct tokens, and for each text the indices of its tokens in
/// that list. An index takes 2 bytes if there are at most 65,536 distinct tokens, otherwise 4.
///
/// The indices are in the order in which tokens first occurred. [`ids`](Self::ids) converts them to the token ids of a
/// vocabulary, so that texts are tokenized once for all vocabularies. A clone is another handle of the same corpus.
///
/// ```
/// use brigade_tokens::{ParallelOptions, TextSource, TokenCorpus, VocabularyOptions};
/// # use brigade_tokens::{Result, TokenList, Tokenizer};
/// # #[derive(Debug)]
/// # struct Words;
/// # impl Tokenizer for Words {
/// #     fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
/// #         tokens.extend(text.split_whitespace());
/// #         Ok(())
/// #     }
/// #     fn describe(&self) -> serde_json::Value { "words".into() }
/// # }
///
/// let texts = TextSource::memory(["to be or not", "to be"])?;
/// let corpus = TokenCorpus::in_memory(&Words, &texts, ParallelOptions::new())?;
/// // The vocabulary of the first text.
/// let vocabulary = VocabularyOptions::new().min_freq(1).build(&corpus.counts_of([0])?);
/// let ids = corpus.ids(&vocabulary)?;
/// let mut second = Vec::new();
/// ids.read(1, 0..2, &mut second)?;
/// assert_eq!(second, [9, 10]);
/// assert_eq!(ids.lengths().collect::<Vec<_>>(), [4, 2]);
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
#[derive(Clone)]
pub struct TokenCorpus(Arc<Parts>);

/// Data of a corpus.
pub(crate) struct Parts {
    pub(crate) key: Key,
    /// Distinct tokens, by number.
    pub(crate) tokens: TokenList,
    /// Number of occurrences of each token.
    pub(crate) times: Vec<u64>,
    /// End of each text, as an index of all tokens.
    pub(crate) ends: Vec<u64>,
    pub(crate) store: Store,
}

impl TokenCorpus {
    /// Tokenizes all texts on several threads, and keeps the tokens in memory.
    ///
    /// # Errors
    /// Returns the same errors as [`tokenize_all`](crate::tokenize_all).
    pub fn in_memory(
        tokenizer: &dyn Tokenizer,
        texts: &TextSource,
        options: ParallelOptions<'_>,
    ) -> Result<Self> {
        let mut builder = Builder::new(Vec::new());
        let content = builder.add_all(tokenizer, texts, options)?;
        builder.finish(Key::new(tokenizer, &content), Store::Memory).map(Self::new)
    }

    pub(crate) fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }

    pub(crate) fn parts(&self) -> &Parts {
        &self.0
    }

    /// Returns the number of texts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.ends.len()
    }

    /// Returns `true` if there are no texts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.ends.is_empty()
    }

    /// Returns the number of tokens of all texts.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.0.ends.last().copied().unwrap_or(0)
    }

    /// Returns the number of tokens of a text.
    #[must_use]
    pub fn length(&self, text: usize) -> Option<usize> {
        let Range { start, end } = self.0.range(text)?;
        usize::try_from(end - start).ok()
    }

    /// Returns the numbers of tokens of all texts.
    #[must_use]
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.len()).map(|text| self.length(text).unwrap_or_default())
    }

    /// Returns the hash of the texts and of the tokenizer's description, as 64 hexadecimal digits. It is equal on all
    /// ranks that have the same corpus.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        self.0.key.to_string()
    }

    /// Returns the tokens of a text.
    ///
    /// # Errors
    /// Fails if a text does not exist, or the file cannot be read.
    pub fn tokens(&self, text: usize) -> Result<TokenList> {
        let mut tokens = TokenList::new();
        let length = self.length(text).unwrap_or(0);
        self.0.read(text, 0..length, |id| match self.0.tokens.get(id as usize) {
            Some(token) => {
                tokens.push(token);
                Ok(())
            }
            None => Err(self.0.store.damaged()),
        })?;
        Ok(tokens)
    }

    /// Returns the number of occurrences of each token in all texts.
    #[must_use]
    pub fn counts(&self) -> TokenCounts {
        let mut counts = TokenCounts::new();
        for ((token, times), place) in self.0.tokens.iter().zip(&self.0.times).zip(0..) {
            counts.add_times(token, *times, (0, place));
        }
        counts
    }

    /// Returns the number of occurrences of each token in some texts, such as those for training. The order of the
    /// texts decides which of equally common tokens comes first.
    ///
    /// # Errors
    /// Fails if a text does not exist, or the file cannot be read.
    pub fn counts_of(&self, texts: impl IntoIterator<Item = usize>) -> Result<TokenCounts> {
        let mut seen: Vec<(u64, u64)> = vec![(0, 0); self.0.tokens.len()];
        let mut place = 0;
        for text in texts {
            let length = self.length(text).unwrap_or(0);
            self.0.read(text, 0..length, |id| {
                let (times, first) =
                    seen.get_mut(id as usize).ok_or_else(|| self.0.store.damaged())?;
                if *times == 0 {
                    *first = place;
                }
                *times += 1;
                place += 1;
                Ok(())
            })?;
        }
        let mut counts = TokenCounts::new();
        for (token, (times, first)) in self.0.tokens.iter().zip(seen) {
            if times > 0 {
                counts.add_times(token, times, (0, first));
            }
        }
        Ok(counts)
    }

    /// Returns the token ids of all texts in a vocabulary. Only the distinct tokens are looked up; no text is read.
    ///
    /// # Errors
    /// Fails if the vocabulary has neither a token of the corpus nor an unknown token.
    pub fn ids(&self, vocabulary: &Vocabulary) -> Result<TokenIds> {
        let numbers = self.0.tokens.iter().map(|token| vocabulary.id_or_unknown(token));
        Ok(TokenIds { corpus: self.clone(), numbers: numbers.collect::<Result<_>>()? })
    }
}

impl fmt::Debug for TokenCorpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenCorpus")
            .field("texts", &self.len())
            .field("tokens", &self.token_count())
            .field("different", &self.0.tokens.len())
            .field("store", &self.0.store)
            .finish()
    }
}

impl Parts {
    /// Returns the range of a text's tokens among those of all texts.
    fn range(&self, text: usize) -> Option<Range<u64>> {
        let end = *self.ends.get(text)?;
        let start = text.checked_sub(1).and_then(|before| self.ends.get(before));
        Some(start.copied().unwrap_or(0)..end)
    }

    /// Passes the numbers of some tokens of a text to `visit`.
    fn read(
        &self,
        text: usize,
        part: Range<usize>,
        visit: impl FnMut(u32) -> Result<()>,
    ) -> Result<()> {
        let range = self.range(text).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "text {text} is out of range: there are {}, numbered from 0",
                self.ends.len()
            ))
        })?;
        let length = range.end - range.start;
        if part.start > part.end || part.end as u64 > length {
            return Err(Error::InvalidArgument(format!(
                "text {text} has {}, but {} to {} are needed",
                counted(length, "token"),
                part.start,
                part.end
            )));
        }
        let first = range.start + part.start as u64;
        self.store.read(first, part.len(), visit)
    }
}

/// The token ids of the texts of a [`TokenCorpus`] in a vocabulary.
///
/// Several threads may read at the same time. All ranks of a host read the same file, which the system's page cache
/// holds once.
#[derive(Clone)]
pub struct TokenIds {
    corpus: TokenCorpus,
    /// Id in the vocabulary for each number of the corpus.
    numbers: Arc<[u32]>,
}

impl TokenIds {
    /// Returns the number of texts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.corpus.len()
    }

    /// Returns `true` if there are no texts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.corpus.is_empty()
    }

    /// Returns the number of tokens of a text.
    #[must_use]
    pub fn length(&self, text: usize) -> Option<usize> {
        self.corpus.length(text)
    }

    /// Returns the numbers of tokens of all texts.
    #[must_use]
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.corpus.lengths()
    }

    /// Returns the underlying corpus.
    #[must_use]
    pub fn corpus(&self) -> &TokenCorpus {
        &self.corpus
    }

    /// Appends the ids of a range of a text's tokens to `ids`, as `i64`, the index type of embeddings.
    ///
    /// # Errors
    /// Fails if the text does not exist, has fewer tokens, or the file cannot be read.
    pub fn read(&self, text: usize, tokens: Range<usize>, ids: &mut Vec<i64>) -> Result<()> {
        ids.reserve(tokens.len());
        self.corpus.0.read(text, tokens, |id| {
            let number = self.numbers.get(id as usize);
            ids.push(i64::from(*number.ok_or_else(|| self.corpus.0.store.damaged())?));
            Ok(())
        })
    }
}

impl fmt::Debug for TokenIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenIds").field("corpus", &self.corpus).finish_non_exhaustive()
    }
}

/// Numbers of tokens while a corpus is built.
type Numbers = HashMap<Box<str>, u32, foldhash::fast::RandomState>;
