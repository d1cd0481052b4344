//! Counts of tokens.

use std::collections::HashMap;

use foldhash::fast::RandomState;

/// Number of occurrences of each token, and the position of its first occurrence.
///
/// Each thread can count some of the texts; the result of [`merge`](Self::merge) does not depend on the division of the
/// texts among threads, nor on the order of merging.
///
/// ```
/// use brigade_tokens::TokenCounts;
///
/// let (mut one, mut other) = (TokenCounts::new(), TokenCounts::new());
/// other.add(1, ["b", "a", "a"]);
/// one.add(0, ["c", "b"]);
/// one.merge(other);
/// assert_eq!(one.most_common(), [("b", 2), ("a", 2), ("c", 1)]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    counts: HashMap<Box<str>, Count, RandomState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    times: u64,
    /// Index of the text, and the position in it.
    first: (u64, u64),
}

impl TokenCounts {
    /// Creates empty token counts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the tokens of the text with index `text`. Add each text once.
    pub fn add<'a>(&mut self, text: u64, tokens: impl IntoIterator<Item = &'a str>) {
        for (token, place) in tokens.into_iter().zip(0..) {
            self.add_times(token, 1, (text, place));
        }
    }

    /// Adds `times` occurrences of a token, the first of which is at this text and position.
    pub(crate) fn add_times(&mut self, token: &str, times: u64, first: (u64, u64)) {
        if let Some(count) = self.counts.get_mut(token) {
            count.times += times;
            count.first = count.first.min(first);
        } else {
            self.counts.insert(token.into(), Count { times, first });
        }
    }

    /// Adds the counts of other texts.
    pub fn merge(&mut self, other: Self) {
        for (token, Count { times, first }) in other.counts {
            let count = self.counts.entry(token).or_insert(Count { times: 0, first });
            count.times += times;
            count.first = count.first.min(first);
        }
    }

    /// Returns the number of occurrences of a token.
    #[must_use]
    pub fn get(&self, token: &str) -> u64 {
        self.counts.get(token).map_or(0, |count| count.times)
    }

    /// Returns the number of distinct tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Returns `true` if no token was counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Returns all tokens with their numbers of occurrences, the most common first, equally common ones in the order of
    /// their first occurrence: the order of Python's `Counter.most_common`.
    #[must_use]
    pub fn most_common(&self) -> Vec<(&str, u64)> {
        let mut all: Vec<(&Box<str>, &Count)> = self.counts.iter().collect();
        // The token itself decides only if two texts had the same index.
        all.sort_unstable_by_key(|(token, count)| {
            (std::cmp::Reverse(count.times), count.first, *token)
        });
        all.into_iter().map(|(token, count)| (&**token, count.times)).collect()
    }
}
