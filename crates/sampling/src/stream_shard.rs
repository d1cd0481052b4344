//! Sharding data without a known length: every rank reads the stream and keeps its part.

use std::ops::Range;

use crate::{PlanError, Round, Scheme, ShardOptions};

/// The part of one rank of a stream of samples, by the rules of Accelerate's `IterableDatasetShard`.
///
/// The stream is cut into rounds of `batch_size * world` samples (`batch_size` with `split_batches`), and each rank has
/// its slice of every round. A last, incomplete round is completed with samples of the first (the default), dropped
/// (`drop_last`), or returned as it is (`even_batches` off). Whole rounds are returned as soon as they are complete.
///
/// Only this rank's samples are kept in memory, and one copy of the first round where it may be needed to complete the
/// last.
///
/// ```
/// use brigade_sampling::{ShardOptions, StreamShard};
///
/// let mut shard = StreamShard::new(2, 1, 2, ShardOptions::default())?; // rank 1 of 2
/// let mut batches: Vec<_> = "abcdefghi".chars().filter_map(|item| shard.push(item)).collect();
/// batches.extend(shard.finish());
/// let items: Vec<String> = batches.iter().map(|batch| batch.items.iter().collect()).collect();
/// assert_eq!(items, ["cd", "gh", "bc"]);
/// assert_eq!(batches[2].round.valid, [1, 0]); // only the "i" of rank 0 is new
/// # Ok::<(), brigade_sampling::PlanError>(())
/// ```
#[derive(Debug, Clone)]
pub struct StreamShard<T> {
    /// Number of samples of a full round on each rank.
    rows: usize,
    rank: usize,
    world: usize,
    even: bool,
    drop_last: bool,
    /// Number of samples of the current round that were pushed, for all ranks.
    arrived: usize,
    /// Samples of the current round that belong to this rank.
    own: Vec<T>,
    /// The samples of the first round, to complete the last.
    first: Vec<T>,
    first_done: bool,
}

/// The batch of one rank in one round of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamBatch<T> {
    /// Samples of the batch, duplicates last.
    pub items: Vec<T>,
    /// Number of valid samples at the front of `items`.
    pub valid: usize,
    /// The batch sizes of all ranks in this round.
    pub round: Round,
}

impl<T: Clone> StreamShard<T> {
    /// Creates the shard of `rank` in a world of `world` ranks. `drop_tail` is ignored, and the only possible scheme is
    /// Accelerate's.
    ///
    /// # Errors
    /// Fails if the batch size or the world size is 0, the rank is not below the world size, the scheme is not
    /// Accelerate's, or with `split_batches` the batch size is not a multiple of `world`.
    pub fn new(
        batch_size: usize,
        rank: usize,
        world: usize,
        options: ShardOptions,
    ) -> Result<Self, PlanError> {
        if options.scheme != Scheme::Accelerate {
            let scheme = options.scheme.name();
            return Err(PlanError::SchemeNeedsOrder { scheme, what: "streams" });
        }
        options.check(world, Some(batch_size))?;
        if rank >= world {
            return Err(PlanError::RankOutOfRange { rank, world });
        }
        let rows = if options.split_batches { batch_size / world } else { batch_size };
        if rows.checked_mul(world).is_none() {
            return Err(PlanError::TooLarge { samples: 0, batch_size, world });
        }
        Ok(Self {
            rows,
            rank,
            world,
            even: options.even_batches,
            drop_last: options.drop_last,
            arrived: 0,
            own: Vec::new(),
            first: Vec::new(),
            first_done: false,
        })
    }

    /// Adds the next sample of the stream, and returns this rank's batch if the sample completes a round.
    pub fn push(&mut self, item: T) -> Option<StreamBatch<T>> {
        let keeps_first = !self.first_done && self.even && !self.drop_last;
        let is_own = self.places().contains(&self.arrived);
        match (keeps_first, is_own) {
            (true, true) => {
                self.first.push(item.clone());
                self.own.push(item);
            }
            (true, false) => self.first.push(item),
            (false, true) => self.own.push(item),
            (false, false) => {}
        }
        self.arrived += 1;
        if self.arrived < self.rows * self.world {
            return None;
        }
        self.arrived = 0;
        self.first_done = true;
        let round = Round { rows: vec![self.rows; self.world], valid: vec![self.rows; self.world] };
        Some(StreamBatch { items: std::mem::take(&mut self.own), valid: self.rows, round })
    }

    /// Ends the stream, and returns this rank's batch of the last, incomplete round. Returns `None` if the last round
    /// was complete, is dropped, or has no samples for this rank.
    #[must_use]
    pub fn finish(mut self) -> Option<StreamBatch<T>> {
        if self.arrived == 0 || self.drop_last {
            return None;
        }
        let valid: Vec<usize> = (0..self.world)
            .map(|rank| self.arrived.saturating_sub(rank * self.rows).min(self.rows))
            .collect();
        let rows = if self.even { vec![self.rows; self.world] } else { valid.clone() };
        if self.even {
            for place in self.places().skip(valid[self.rank]) {
                self.own.push(self.first[(place - self.arrived) % self.first.len()].clone());
            }
        }
        let items = std::mem::take(&mut self.own);
        let valid_here = valid[self.rank];
        (!items.is_empty()).then_some(StreamBatch {
            items,
            valid: valid_here,
            round: Round { rows, valid },
        })
    }

    /// Returns the positions of this rank's samples in a round.
    fn places(&self) -> Range<usize> {
        self.rank * self.rows..(self.rank + 1) * self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(samples: u32, rank: usize, options: ShardOptions) -> Vec<StreamBatch<u32>> {
        let mut shard = StreamShard::new(2, rank, 3, options).unwrap();
        let mut batches: Vec<_> = (0..samples).filter_map(|item| shard.push(item)).collect();
        batches.extend(shard.finish());
        batches
    }

    #[test]
    fn an_uneven_end_gives_each_rank_what_is_left_for_it() {
        let uneven = ShardOptions { even_batches: false, ..Default::default() };
        let last = |rank| all(9, rank, uneven).pop().unwrap();
        assert_eq!((last(0).items, last(1).items), (vec![6, 7], vec![8]));
        assert_eq!(last(2).items, [4, 5]); // of the round before: the last has no samples for it
        assert_eq!(last(1).round, Round { rows: vec![2, 1, 0], valid: vec![2, 1, 0] });
    }

    #[test]
    fn nothing_in_nothing_out() {
        assert_eq!(all(0, 0, ShardOptions::default()), []);
    }

    #[test]
    fn impossible_streams_are_errors() {
        let new = |batch, rank, world, options| {
            StreamShard::<u8>::new(batch, rank, world, options).unwrap_err().to_string()
        };
        let default = ShardOptions::default();
        assert!(new(0, 0, 1, default).starts_with("the batch size is 0"));
        assert!(new(1, 2, 2, default).starts_with("rank 2 does not exist among 2 ranks"));
        let split = ShardOptions { split_batches: true, ..default };
        assert!(new(1, 0, 2, split).contains("use 2, or turn"));
        let fastai = ShardOptions { scheme: Scheme::Fastai, ..default };
        assert!(new(1, 0, 2, fastai).contains("not streams"));
        assert!(new(usize::MAX, 0, 2, default).contains("do not fit"));
    }
}
