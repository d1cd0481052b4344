//! What a rank gets in a round, and what all ranks get.

use std::ops::Range;

/// A batch of one rank. Its first `valid` samples are this epoch's; the rest are duplicates of
/// samples that some rank has in this epoch anyway, appended so that all ranks run the same shapes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlannedBatch {
    /// Indices into the data set.
    pub indices: Vec<usize>,
    /// How many of them, from the front, count; 0 for a batch that only keeps the rank in step.
    pub valid: usize,
}

impl PlannedBatch {
    /// The samples that count.
    #[must_use]
    pub fn valid_indices(&self) -> &[usize] {
        &self.indices[..self.valid]
    }

    /// The duplicates that complete the batch.
    #[must_use]
    pub fn duplicates(&self) -> &[usize] {
        &self.indices[self.valid..]
    }
}

/// The sizes of one round on all ranks. Every rank computes it alone, so a gather can leave the
/// duplicates out without another message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Round {
    /// Samples in each rank's batch; 0 where a rank has none in this round.
    pub rows: Vec<usize>,
    /// How many of them, from the front, are this epoch's.
    pub valid: Vec<usize>,
}

impl Round {
    /// Samples of all ranks that count.
    #[must_use]
    pub fn total_valid(&self) -> usize {
        self.valid.iter().sum()
    }

    /// Whether every sample of every rank counts.
    #[must_use]
    pub fn is_all_valid(&self) -> bool {
        self.rows == self.valid
    }

    /// Whether all ranks have batches of one size, as a plain all-gather needs.
    #[must_use]
    pub fn is_even(&self) -> bool {
        self.rows.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Which rows count when the batches of all ranks are put one after another in rank order.
    /// Neighbouring ranges are merged, so a round without duplicates is one range, and the usual
    /// last round, duplicates at its end, is one as well.
    ///
    /// ```
    /// use brigade_sampling::Round;
    ///
    /// let round = Round { rows: vec![3, 3, 3], valid: vec![3, 1, 2] };
    /// assert_eq!(round.valid_ranges(), [0..4, 6..8]);
    /// ```
    #[must_use]
    pub fn valid_ranges(&self) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut start = 0;
        for (&rows, &valid) in self.rows.iter().zip(&self.valid) {
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end += valid,
                _ if valid > 0 => ranges.push(start..start + valid),
                _ => {}
            }
            start += rows;
        }
        ranges
    }
}
