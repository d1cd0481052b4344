//! Distributing batches that exist already and have no common size: only whole ones.

use std::sync::Arc;

use super::{ShardOptions, Totals};
use crate::{PlanError, PlannedBatch};

#[derive(Debug, Clone)]
pub(super) struct BatchList {
    batches: Arc<[Vec<usize>]>,
    world: usize,
    rounds: usize,
    even: bool,
}

impl BatchList {
    /// Stores the batches. `options` must have been checked.
    pub(super) fn new(
        batches: Vec<Vec<usize>>,
        world: usize,
        options: ShardOptions,
    ) -> Result<Self, PlanError> {
        if let Some(index) = batches.iter().position(Vec::is_empty) {
            return Err(PlanError::EmptyBatch { index });
        }
        let rounds =
            if options.drop_last { batches.len() / world } else { batches.len().div_ceil(world) };
        Ok(Self { batches: batches.into(), world, rounds, even: options.even_batches })
    }

    /// Returns the order from which batches of `batch_size` were cut.
    pub(super) fn flatten(&self, batch_size: usize) -> Result<Vec<usize>, PlanError> {
        let last = self.batches.len().saturating_sub(1);
        for (index, batch) in self.batches.iter().enumerate() {
            let rows = batch.len();
            if rows > batch_size || (rows < batch_size && index < last) {
                return Err(PlanError::RaggedBatch { index, rows, batch_size });
            }
        }
        Ok(self.batches.concat())
    }

    pub(super) fn rounds(&self) -> usize {
        self.rounds
    }

    pub(super) fn batch(&self, rank: usize, round: usize) -> Option<PlannedBatch> {
        let (batch, valid) = self.at(rank, round)?;
        Some(PlannedBatch { indices: batch.clone(), valid })
    }

    pub(super) fn sizes(&self, rank: usize, round: usize) -> Option<(usize, usize)> {
        self.at(rank, round).map(|(batch, valid)| (batch.len(), valid))
    }

    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals { seen: 0, duplicated: 0, dropped: 0 };
        for (rows, valid) in (0..self.rounds)
            .flat_map(|round| (0..self.world).filter_map(move |rank| self.sizes(rank, round)))
        {
            totals.seen += valid;
            totals.duplicated += rows - valid;
        }
        totals.dropped = self.batches.iter().map(Vec::len).sum::<usize>() - totals.seen;
        totals
    }

    /// Returns the batch of a rank and the number of its valid rows: all or none.
    fn at(&self, rank: usize, round: usize) -> Option<(&Vec<usize>, usize)> {
        if round >= self.rounds {
            return None;
        }
        let place = round * self.world + rank;
        match self.batches.get(place) {
            Some(batch) => Some((batch, batch.len())),
            // A round exists only where a batch does, so the list is not empty here.
            None if self.even => Some((&self.batches[place % self.batches.len()], 0)),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Shards, Totals};
    use crate::{PlanError, Round, Scheme, ShardOptions};

    fn by_rank(shards: &Shards) -> Vec<Vec<(Vec<usize>, usize)>> {
        (0..shards.world())
            .map(|rank| shards.rank(rank).map(|batch| (batch.indices, batch.valid)).collect())
            .collect()
    }

    fn varying() -> Vec<Vec<usize>> {
        vec![vec![0, 1, 2], vec![3], vec![4, 5], vec![6, 7, 8, 9]]
    }

    #[test]
    fn whole_batches_from_the_start_complete_the_last_round() {
        let shards = Shards::from_batches(varying(), None, 3, ShardOptions::default()).unwrap();
        assert_eq!(
            by_rank(&shards),
            [
                [(vec![0, 1, 2], 3), (vec![6, 7, 8, 9], 4)],
                [(vec![3], 1), (vec![0, 1, 2], 0)],
                [(vec![4, 5], 2), (vec![3], 0)],
            ]
        );
        assert_eq!(shards.round(1), Round { rows: vec![4, 3, 1], valid: vec![4, 0, 0] });
        assert_eq!(shards.totals(), Totals { seen: 10, duplicated: 4, dropped: 0 });
    }

    #[test]
    fn fewer_batches_than_ranks_are_repeated() {
        let two = vec![vec![7, 8], vec![9]];
        let shards = Shards::from_batches(two, None, 5, ShardOptions::default()).unwrap();
        let first: Vec<_> = (0..5).map(|rank| shards.batch(rank, 0).unwrap().indices).collect();
        assert_eq!(first, [vec![7, 8], vec![9], vec![7, 8], vec![9], vec![7, 8]]);
    }

    #[test]
    fn an_incomplete_round_can_be_left_uneven_or_dropped() {
        let uneven = ShardOptions { even_batches: false, ..Default::default() };
        let shards = Shards::from_batches(varying(), None, 3, uneven).unwrap();
        assert_eq!([0, 1, 2].map(|rank| shards.num_batches(rank)), [2, 1, 1]);
        let dropping = ShardOptions { drop_last: true, ..Default::default() };
        let shards = Shards::from_batches(varying(), None, 3, dropping).unwrap();
        assert_eq!(shards.rounds(), 1);
        assert_eq!(shards.totals(), Totals { seen: 6, duplicated: 0, dropped: 4 });
    }

    #[test]
    fn batches_of_a_declared_size_are_the_order_they_were_cut_from() {
        let batches: Vec<Vec<usize>> =
            (0..11).collect::<Vec<_>>().chunks(4).map(Vec::from).collect();
        for split_batches in [false, true] {
            let options = ShardOptions { split_batches, ..Default::default() };
            let listed = Shards::from_batches(batches.clone(), Some(4), 2, options).unwrap();
            let order: Vec<usize> = (0..11).collect();
            let dealt = Shards::new(order, 4, 2, options).unwrap();
            assert_eq!(by_rank(&listed), by_rank(&dealt));
        }
    }

    #[test]
    fn unusable_lists_are_named() {
        let make = |size, options| Shards::from_batches(varying(), size, 2, options).unwrap_err();
        let default = ShardOptions::default();
        let ragged = PlanError::RaggedBatch { index: 0, rows: 3, batch_size: 4 };
        assert_eq!(make(Some(4), default), ragged);
        assert_eq!(make(Some(0), default), PlanError::Zero { what: "batch size" });
        let split = ShardOptions { split_batches: true, ..default };
        assert_eq!(make(None, split), PlanError::SplitWithoutBatchSize);
        let torch = ShardOptions { scheme: Scheme::Torch, ..default };
        assert!(make(None, torch).to_string().starts_with("the scheme torch deals out samples"));
        let hole = vec![vec![1], vec![]];
        let error = Shards::from_batches(hole, None, 2, default).unwrap_err();
        assert_eq!(error, PlanError::EmptyBatch { index: 1 });
    }
}
