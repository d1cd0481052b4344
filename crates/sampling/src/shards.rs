//! Shards: the assignment of samples to ranks.

use std::ops::Range;

use crate::{Order, PlanError, PlannedBatch, Round};
use index_sharding::IndexSharding;
use list::BatchList;

mod index_sharding;
mod list;

/// The batches of every rank for one epoch.
///
/// A plan is arithmetic over the epoch's order: a batch is computed when it is requested, and any batch can be
/// requested directly, so that resuming means starting at a later round. Every rank computes the whole plan by itself,
/// which takes no time and no memory beyond the order.
///
/// In every scheme, the valid samples of all ranks and rounds together are the order without the dropped samples, each
/// exactly once. All other samples of a batch are duplicates that keep the ranks in step.
///
/// A world of one rank is planned by the same rules, so that its last batch is completed as well unless `even_batches`
/// is off. A process that runs alone needs no completion: see [`BatchSampler`](crate::BatchSampler).
///
/// ```
/// use brigade_sampling::{Order, ShardOptions, Shards};
///
/// let shards = Shards::new(Order::Sequential(10), 3, 2, ShardOptions::default())?;
/// assert_eq!(shards.batch(0, 1).unwrap().indices, [6, 7, 8]);
/// let last = shards.batch(1, 1).unwrap();
/// assert_eq!((last.indices, last.valid), (vec![9, 0, 1], 1));
/// # Ok::<(), brigade_sampling::PlanError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Shards {
    plan: Plan,
    world: usize,
}

/// The library whose rules distribute the samples among the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Accelerate's `BatchSamplerShard`: batches go to the ranks in turn, or each batch is split among them. The
    /// batches of a round, concatenated in rank order, are in the order of the epoch.
    #[default]
    Accelerate,
    /// torch's `DistributedSampler`: sample `i` goes to rank `i % world`, and each rank makes its own batches.
    Torch,
    /// fastai's `DistributedDL`: each rank has one contiguous block of the order and makes its own batches.
    Fastai,
}

impl Scheme {
    /// Returns the name of the scheme in options and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Accelerate => "accelerate",
            Self::Torch => "torch",
            Self::Fastai => "fastai",
        }
    }
}

/// Options of how samples are distributed among the ranks. The defaults are Accelerate's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ShardOptions {
    /// Rules by which samples are distributed. Defaults to [`Scheme::Accelerate`].
    pub scheme: Scheme,
    /// `true` if the batch size is that of all ranks together, and each batch is cut into one piece per rank; `false`
    /// if it is the batch size of one rank. Only with Accelerate's scheme. Defaults to `false`.
    pub split_batches: bool,
    /// `true` to complete the last round with samples from the start of the order, so that every rank has the same
    /// number of batches and all are full; `false` if the last batch of a rank may be smaller or missing. Can be
    /// `false` only with Accelerate's scheme; the others always complete. Defaults to `true`.
    pub even_batches: bool,
    /// `true` to return full batches only: with Accelerate's scheme the last round is dropped if it is not full on
    /// every rank, with the others each rank drops its own smaller last batch. Defaults to `false`.
    pub drop_last: bool,
    /// `true` to drop the samples at the end of the order that exceed a multiple of the world size instead of
    /// completing them with duplicates: `drop_last` of torch's `DistributedSampler`. It does not change the batches;
    /// `drop_last` of torch's data loader is [`drop_last`](Self::drop_last). Only with torch's scheme. Defaults to
    /// `false`.
    pub drop_tail: bool,
}

impl Default for ShardOptions {
    fn default() -> Self {
        Self {
            scheme: Scheme::Accelerate,
            split_batches: false,
            even_batches: true,
            drop_last: false,
            drop_tail: false,
        }
    }
}

/// Sums over all ranks and rounds of a plan, in samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Totals {
    /// Number of samples of the order that some rank gets, each counted once.
    pub seen: usize,
    /// Number of places in batches that are filled with duplicates.
    pub duplicated: usize,
    /// Number of samples of the order that no rank gets.
    pub dropped: usize,
}

impl Shards {
    /// Distributes `order` in batches of `batch_size` to `world` ranks.
    ///
    /// # Errors
    /// Fails if the batch size or the world size is 0, with `split_batches` if the batch size is not a multiple of
    /// `world`, for an option that the scheme does not have, and for sizes whose product overflows.
    pub fn new(
        order: impl Into<Order>,
        batch_size: usize,
        world: usize,
        options: ShardOptions,
    ) -> Result<Self, PlanError> {
        options.check(world, Some(batch_size))?;
        let sharding = IndexSharding::new(order.into(), batch_size, world, options)?;
        Ok(Self { plan: Plan::IndexSharding(sharding), world })
    }

    /// Distributes batches that exist already, such as those of a batch sampler that groups samples by length.
    ///
    /// With a `batch_size`, all batches but the last must have that size, and the plan is that of [`Shards::new`] over
    /// the concatenated batches. Without a `batch_size`, batches may have any size: they are never cut or completed.
    /// Where the last round lacks batches, with `even_batches` whole batches from the start of the list are repeated,
    /// none of their samples valid; without it, some ranks have no batch in that round.
    ///
    /// # Errors
    /// Returns the same errors as [`Shards::new`], and fails for an empty batch, a batch that does not have the
    /// declared size, `split_batches` without a batch size, and a scheme other than Accelerate's.
    pub fn from_batches(
        batches: Vec<Vec<usize>>,
        batch_size: Option<usize>,
        world: usize,
        options: ShardOptions,
    ) -> Result<Self, PlanError> {
        if options.scheme != Scheme::Accelerate {
            let scheme = options.scheme.name();
            return Err(PlanError::SchemeNeedsOrder {
                scheme,
                what: "batches that are made already",
            });
        }
        options.check(world, batch_size)?;
        let list = BatchList::new(batches, world, options)?;
        match batch_size {
            Some(batch_size) => Self::new(list.flatten(batch_size)?, batch_size, world, options),
            None => Ok(Self { plan: Plan::List(list), world }),
        }
    }

    /// Returns the world size: the number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// Returns the number of rounds, which is the largest number of batches of any rank.
    #[must_use]
    pub fn rounds(&self) -> usize {
        match &self.plan {
            Plan::IndexSharding(sharding) => sharding.rounds(),
            Plan::List(list) => list.rounds(),
        }
    }

    /// Returns the number of batches of a rank. All ranks have [`rounds`](Self::rounds) batches unless `even_batches`
    /// is off; a rank that is not below the world size has none.
    #[must_use]
    pub fn num_batches(&self, rank: usize) -> usize {
        let rounds = self.rounds();
        // Only the last round can lack a batch.
        match rounds.checked_sub(1) {
            Some(last) if self.sizes(rank, last).is_none() => {
                if rank < self.world {
                    last
                } else {
                    0
                }
            }
            _ => rounds,
        }
    }

    /// Returns the batch of a rank in a round, or `None` if the rank has none.
    #[must_use]
    pub fn batch(&self, rank: usize, round: usize) -> Option<PlannedBatch> {
        if rank >= self.world {
            return None;
        }
        match &self.plan {
            Plan::IndexSharding(sharding) => sharding.batch(rank, round),
            Plan::List(list) => list.batch(rank, round),
        }
    }

    /// Returns an iterator over the batches of a rank, in order. `skip(n)` takes constant time, so that training can
    /// resume at round `n`.
    ///
    /// ```
    /// use brigade_sampling::{Order, ShardOptions, Shards};
    ///
    /// let shards = Shards::new(Order::Sequential(12), 2, 2, ShardOptions::default())?;
    /// let rest: Vec<_> = shards.rank(1).skip(1).map(|batch| batch.indices).collect();
    /// assert_eq!(rest, [[6, 7], [10, 11]]);
    /// # Ok::<(), brigade_sampling::PlanError>(())
    /// ```
    #[must_use]
    pub fn rank(&self, rank: usize) -> RankBatches<'_> {
        RankBatches { shards: self, rank, rounds: 0..self.num_batches(rank) }
    }

    /// Returns the batch sizes of all ranks in a round. All are 0 from [`rounds`](Self::rounds) on.
    #[must_use]
    pub fn round(&self, round: usize) -> Round {
        let (rows, valid) =
            (0..self.world).map(|rank| self.sizes(rank, round).unwrap_or((0, 0))).unzip();
        Round { rows, valid }
    }

    /// Returns the sums over the whole plan.
    #[must_use]
    pub fn totals(&self) -> Totals {
        match &self.plan {
            Plan::IndexSharding(sharding) => sharding.totals(),
            Plan::List(list) => list.totals(),
        }
    }

    /// Returns the numbers of rows and of valid rows of a batch.
    fn sizes(&self, rank: usize, round: usize) -> Option<(usize, usize)> {
        if rank >= self.world {
            return None;
        }
        match &self.plan {
            Plan::IndexSharding(sharding) => sharding.sizes(rank, round),
            Plan::List(list) => list.sizes(rank, round),
        }
    }
}

/// Iterator over the batches of one rank, made by [`Shards::rank`].
#[derive(Debug, Clone)]
pub struct RankBatches<'a> {
    shards: &'a Shards,
    rank: usize,
    rounds: Range<usize>,
}

impl Iterator for RankBatches<'_> {
    type Item = PlannedBatch;

    fn next(&mut self) -> Option<PlannedBatch> {
        self.shards.batch(self.rank, self.rounds.next()?)
    }

    fn nth(&mut self, n: usize) -> Option<PlannedBatch> {
        self.shards.batch(self.rank, self.rounds.nth(n)?)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.rounds.size_hint()
    }
}

impl ExactSizeIterator for RankBatches<'_> {}

#[derive(Debug, Clone)]
enum Plan {
    /// An order, distributed by position.
    IndexSharding(IndexSharding),
    /// Batches of any size, distributed whole.
    List(BatchList),
}

impl ShardOptions {
    /// Checks everything that does not depend on the samples. `batch_size` is `None` if no common size is known.
    pub(crate) fn check(&self, world: usize, batch_size: Option<usize>) -> Result<(), PlanError> {
        if world == 0 {
            return Err(PlanError::Zero { what: "number of ranks" });
        }
        if batch_size == Some(0) {
            return Err(PlanError::Zero { what: "batch size" });
        }
        let foreign = |option, of: Scheme| {
            Err(PlanError::ForeignOption { option, scheme: self.scheme.name(), of: of.name() })
        };
        if self.split_batches && self.scheme != Scheme::Accelerate {
            return foreign("split_batches", Scheme::Accelerate);
        }
        if !self.even_batches && self.scheme != Scheme::Accelerate {
            return foreign("even_batches = false", Scheme::Accelerate);
        }
        if self.drop_tail && self.scheme != Scheme::Torch {
            return foreign("drop_tail", Scheme::Torch);
        }
        match batch_size {
            None if self.split_batches => Err(PlanError::SplitWithoutBatchSize),
            Some(batch_size) if self.split_batches && batch_size % world != 0 => {
                Err(PlanError::SplitNotDivisible { batch_size, world })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(batch_size: usize, world: usize, options: ShardOptions) -> String {
        Shards::new(Order::Sequential(5), batch_size, world, options).unwrap_err().to_string()
    }

    #[test]
    fn impossible_plans_are_errors() {
        let default = ShardOptions::default();
        assert!(error(0, 1, default).starts_with("the batch size is 0"));
        assert!(error(1, 0, default).starts_with("the number of ranks is 0"));
        let split = ShardOptions { split_batches: true, ..default };
        assert!(error(10, 4, split).contains("10 does not divide by 4 ranks: use 8 or 12"));
        let torch = ShardOptions { scheme: Scheme::Torch, ..split };
        assert!(error(4, 2, torch).starts_with("split_batches has no meaning in the scheme torch"));
        let fastai = ShardOptions { scheme: Scheme::Fastai, even_batches: false, ..default };
        assert!(error(4, 2, fastai).starts_with("even_batches = false has no meaning"));
        let tail = ShardOptions { drop_tail: true, ..default };
        assert!(error(4, 2, tail).ends_with("leave it out, or use the scheme torch"));
        assert!(error(usize::MAX / 2, 3, default).contains("do not fit"));
        assert!(error(usize::MAX, 1, default).contains("do not fit"));
    }

    #[test]
    fn an_epoch_without_samples_has_no_rounds() {
        for scheme in [Scheme::Accelerate, Scheme::Torch, Scheme::Fastai] {
            let options = ShardOptions { scheme, ..Default::default() };
            let shards = Shards::new(Vec::new(), 4, 3, options).unwrap();
            assert_eq!((shards.rounds(), shards.num_batches(1)), (0, 0));
            assert_eq!(shards.rank(2).next(), None);
            assert_eq!(shards.totals(), Totals { seen: 0, duplicated: 0, dropped: 0 });
        }
    }

    #[test]
    fn steps_outside_the_plan_are_empty() {
        let shards = Shards::new(Order::Sequential(5), 4, 2, ShardOptions::default()).unwrap();
        assert_eq!((shards.batch(2, 0), shards.batch(0, 1)), (None, None));
        assert_eq!(shards.num_batches(2), 0);
        assert_eq!(shards.round(1), Round { rows: vec![0, 0], valid: vec![0, 0] });
    }

    #[test]
    fn a_plan_of_any_size_costs_nothing() {
        let samples = 1 << 60;
        for scheme in [Scheme::Accelerate, Scheme::Torch, Scheme::Fastai] {
            let options = ShardOptions { scheme, ..Default::default() };
            let shards = Shards::new(Order::Sequential(samples), 64, 1000, options).unwrap();
            assert_eq!(shards.totals().seen, samples);
            let last = shards.rounds() - 1;
            assert_eq!(shards.rank(999).nth(last), shards.batch(999, last));
        }
    }
}
