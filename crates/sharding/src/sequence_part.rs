//! Division of a sequence's tokens among the ranks of a context group.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Method of context parallelism: the way in which attention gets the keys and values of other ranks' tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ContextMethod {
    /// Each rank gathers the keys and values of all tokens before attention, and again in the backward pass
    /// (Accelerate's `allgather`). Supports every mask, and dropout. The default.
    #[default]
    Gather,
    /// Keys and values are passed from rank to rank, while each rank computes attention to those that it has (ring
    /// attention, Accelerate's `alltoall`), so that no rank has all of them. Supports no mask but the causal one, and
    /// no dropout of scores.
    Ring,
    /// Each rank exchanges its tokens of all heads for all tokens of its heads, and back after attention
    /// (DeepSpeed-Ulysses). The number of heads has to be divisible by the number of ranks. Supports every mask, and
    /// dropout.
    Ulysses,
}

impl ContextMethod {
    /// All methods of context parallelism.
    pub const ALL: [Self; 3] = [Self::Gather, Self::Ring, Self::Ulysses];

    /// Returns the name of the method in settings: `gather`, `ring` or `ulysses`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Ring => "ring",
            Self::Ulysses => "ulysses",
        }
    }
}

impl fmt::Display for ContextMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ContextMethod {
    type Err = String;

    /// Parses the name of a method, in upper or lower case.
    ///
    /// # Errors
    /// Returns a message with the valid names for any other text.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|it| it.name().eq_ignore_ascii_case(text.trim()));
        found.ok_or_else(|| {
            format!(
                "{text:?} is not a method of context parallelism: write gather, ring or ulysses"
            )
        })
    }
}

/// Part of a sequence: the tokens that one rank of a context group has.
///
/// The sequence is padded so that all ranks have the same number of tokens. Each rank has neighbouring tokens; or, for
/// a *balanced* part, the sequence is divided into two chunks per rank, of which rank `r` of `n` has the chunks `r` and
/// `2 n - 1 - r`. Under a causal mask, where later tokens attend to more keys, each rank then has the same work.
///
/// ```
/// use brigade_sharding::SequencePart;
///
/// let part = SequencePart::new(16, 1, 4, false);
/// assert_eq!(part.ranges(), [4..8]);
/// let balanced = SequencePart::new(15, 1, 4, true);
/// assert_eq!(balanced.ranges(), [2..4, 12..14]);
/// assert_eq!((balanced.padded_length(), balanced.own_length()), (16, 4));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequencePart {
    length: u64,
    chunk: u64,
    rank: u64,
    ranks: u64,
    is_balanced: bool,
}

impl SequencePart {
    /// Returns the part that `rank` has of a sequence of `length` tokens: all of it if `ranks` is 1 or less.
    #[must_use]
    pub fn new(length: u64, rank: usize, ranks: usize, is_balanced: bool) -> Self {
        let ranks = ranks.max(1) as u64;
        let is_balanced = is_balanced && ranks > 1;
        let chunks = if is_balanced { 2 * ranks } else { ranks };
        Self { length, chunk: length.div_ceil(chunks), rank: rank as u64, ranks, is_balanced }
    }

    /// Returns the number of tokens of the sequence, without padding.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the number of tokens of all ranks, with padding.
    #[must_use]
    pub fn padded_length(&self) -> u64 {
        self.own_length() * self.ranks
    }

    /// Returns the number of tokens of each rank, with padding.
    #[must_use]
    pub fn own_length(&self) -> u64 {
        if self.is_balanced { 2 * self.chunk } else { self.chunk }
    }

    /// Returns `true` if each rank has an early and a late chunk.
    #[must_use]
    pub fn is_balanced(&self) -> bool {
        self.is_balanced
    }

    /// Returns the number of ranks of the context group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks as usize
    }

    /// Returns the ranges of the padded sequence that this rank has, in the order in which it has them.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<u64>> {
        self.ranges_of(self.rank as usize)
    }

    /// Returns the ranges of the padded sequence that another rank has.
    #[must_use]
    pub fn ranges_of(&self, rank: usize) -> Vec<Range<u64>> {
        let range = |chunk: u64| chunk * self.chunk..(chunk + 1) * self.chunk;
        let rank = rank as u64;
        if self.is_balanced {
            vec![range(rank), range((2 * self.ranks).saturating_sub(1 + rank))]
        } else {
            vec![range(rank)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_in_one_part() {
        for ranks in 1..6 {
            for length in 0..40 {
                for is_balanced in [false, true] {
                    let part = SequencePart::new(length, 0, ranks, is_balanced);
                    let all = (0..ranks).flat_map(|rank| part.ranges_of(rank)).flatten();
                    let mut all: Vec<u64> = all.collect();
                    all.sort_unstable();
                    assert_eq!(all, (0..part.padded_length()).collect::<Vec<_>>());
                    assert!(part.padded_length() >= length);
                    let most = if is_balanced { 2 * ranks } else { ranks } as u64;
                    assert!(part.padded_length() - length < most);
                }
            }
        }
    }

    #[test]
    fn methods_have_names() {
        for method in ContextMethod::ALL {
            assert_eq!(method.to_string().to_uppercase().parse(), Ok(method));
        }
        let error = "rings".parse::<ContextMethod>().unwrap_err();
        assert!(
            error.contains("\"rings\"") && error.contains("gather, ring or ulysses"),
            "{error}"
        );
    }
}
