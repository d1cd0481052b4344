//! The batch of one rank, and the sizes of the batches of all ranks in one round.

use std::ops::Range;

/// A batch of one rank. Its first `valid` samples belong to this epoch; the rest are duplicates of samples that some
/// rank has in this epoch anyway, appended so that all ranks run the same shapes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlannedBatch {
    /// Indices into the dataset.
    pub indices: Vec<usize>,
    /// Number of valid samples at the front of `indices`. 0 for a batch that only keeps the rank in step with the
    /// others.
    pub valid: usize,
}

impl PlannedBatch {
    /// Returns the indices of the valid samples.
    #[must_use]
    pub fn valid_indices(&self) -> &[usize] {
        &self.indices[..self.valid]
    }

    /// Returns the duplicates that complete the batch.
    #[must_use]
    pub fn duplicates(&self) -> &[usize] {
        &self.indices[self.valid..]
    }
}

/// The batch sizes of all ranks in one round. Every rank computes them by itself, so that a gather can drop the
/// duplicates without an exchange of sizes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Round {
    /// Number of samples in each rank's batch; 0 where a rank has no batch in this round.
    pub rows: Vec<usize>,
    /// Number of valid samples at the front of each rank's batch.
    pub valid: Vec<usize>,
}

impl Round {
    /// Returns the number of valid samples of all ranks together.
    #[must_use]
    pub fn total_valid(&self) -> usize {
        self.valid.iter().sum()
    }

    /// Returns `true` if no rank's batch contains duplicates.
    #[must_use]
    pub fn is_all_valid(&self) -> bool {
        self.rows == self.valid
    }

    /// Returns `true` if all ranks have batches of one size, as a plain all-gather needs.
    #[must_use]
    pub fn is_even(&self) -> bool {
        self.rows.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Returns the ranges of valid rows in the concatenation of all ranks' batches, in rank order. Neighbouring ranges
    /// are merged: a round without duplicates is one range, and so is the usual last round, whose duplicates are at its
    /// end.
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
