//! Encoded texts, and their truncation.

use std::ops::Range;

use tokenizers::utils::truncation;

/// Encoded text, or pair of texts, in the form that a model takes. All lists have one element per token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoding {
    /// Ids of the tokens.
    pub ids: Vec<u32>,
    /// Token type ids: 0 for the first text and its special tokens, 1 for the second, if the tokenizer distinguishes
    /// them.
    pub type_ids: Vec<u32>,
    /// Attention mask: 1 for each token, 0 for padding.
    pub attention_mask: Vec<u32>,
    /// Special-token mask: 1 for tokens that the tokenizer has added.
    pub special_tokens_mask: Vec<u32>,
    /// Offsets of each token in bytes of its text, or 0 to 0 for special tokens. In Python they are in characters.
    pub offsets: Vec<Range<usize>>,
    /// Index of the word that each token belongs to, as the tokenizer splits words before tokens.
    pub word_ids: Vec<Option<u32>>,
    /// Index of the text that each token belongs to: 0 or 1.
    pub sequence_ids: Vec<Option<usize>>,
    /// Tokens as strings.
    pub tokens: Vec<String>,
}

impl Encoding {
    pub(super) fn of(encoding: &tokenizers::Encoding) -> Self {
        let offsets = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
        Self {
            ids: encoding.get_ids().to_vec(),
            type_ids: encoding.get_type_ids().to_vec(),
            attention_mask: encoding.get_attention_mask().to_vec(),
            special_tokens_mask: encoding.get_special_tokens_mask().to_vec(),
            offsets: offsets.collect(),
            word_ids: encoding.get_word_ids().to_vec(),
            sequence_ids: encoding.get_sequence_ids(),
            tokens: encoding.get_tokens().to_vec(),
        }
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns `true` if there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// Truncation of texts that are too long: `truncation` and `max_length` of `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncation {
    /// Maximum number of tokens, including special tokens.
    pub max_length: usize,
    /// Strategy of truncation: the text of a pair that is truncated.
    pub strategy: TruncationStrategy,
    /// Side from which tokens are removed.
    pub side: Side,
}

impl Truncation {
    /// Creates a truncation to at most `max_length` tokens, from the longer text of a pair, on the right.
    #[must_use]
    pub const fn new(max_length: usize) -> Self {
        Self { max_length, strategy: TruncationStrategy::LongestFirst, side: Side::Right }
    }

    /// Sets the text of a pair that is truncated. Defaults to [`TruncationStrategy::LongestFirst`].
    #[must_use]
    pub const fn strategy(mut self, strategy: TruncationStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Sets the side from which tokens are removed. Defaults to [`Side::Right`].
    #[must_use]
    pub const fn side(mut self, side: Side) -> Self {
        self.side = side;
        self
    }

    /// Returns the crate's parameters for the tokens other than the `around` special tokens, which are fewer than the
    /// maximum length.
    pub(super) fn params(self, around: usize) -> truncation::TruncationParams {
        truncation::TruncationParams {
            direction: self.side.into(),
            max_length: self.max_length.saturating_sub(around),
            strategy: self.strategy.into(),
            stride: 0,
        }
    }

    /// Returns the number of tokens of a text that are enough, of the first (0) or second (1).
    pub(super) fn enough(self, type_id: u32) -> Option<usize> {
        let all = match self.strategy {
            TruncationStrategy::LongestFirst => false,
            TruncationStrategy::OnlyFirst => type_id == 1,
            TruncationStrategy::OnlySecond => type_id == 0,
        };
        (self.side == Side::Right && !all).then_some(self.max_length)
    }

    pub(super) fn describe(self) -> serde_json::Value {
        let strategy = match self.strategy {
            TruncationStrategy::LongestFirst => "longest_first",
            TruncationStrategy::OnlyFirst => "only_first",
            TruncationStrategy::OnlySecond => "only_second",
        };
        serde_json::json!({ "max_length": self.max_length, "strategy": strategy, "side": self.side.name() })
    }
}

/// Strategy of truncation: the text of a pair that is truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TruncationStrategy {
    /// The longer text, until both are equally long, and then both.
    LongestFirst,
    /// Only the first text, or an error if that is not enough.
    OnlyFirst,
    /// Only the second text, or an error if that is not enough or there is none.
    OnlySecond,
}

impl From<TruncationStrategy> for truncation::TruncationStrategy {
    fn from(strategy: TruncationStrategy) -> Self {
        match strategy {
            TruncationStrategy::LongestFirst => Self::LongestFirst,
            TruncationStrategy::OnlyFirst => Self::OnlyFirst,
            TruncationStrategy::OnlySecond => Self::OnlySecond,
        }
    }
}

/// A side of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Left side: the beginning of a text.
    Left,
    /// Right side: the end of a text.
    Right,
}

impl Side {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Left => "left",
            Self::Right => "right",
        }
    }
}

impl From<Side> for truncation::TruncationDirection {
    fn from(side: Side) -> Self {
        match side {
            Side::Left => Self::Left,
            Side::Right => Self::Right,
        }
    }
}
