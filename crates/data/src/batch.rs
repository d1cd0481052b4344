//! A batch and what is known of its place among all batches.

use std::ops::{Deref, DerefMut};

use brigade_rank_env::text::counted;
use brigade_sampling::Round;
use brigade_torch::{Result, TensorTree};

use crate::DataError;

/// One batch of one rank, with the count of its rows that are real.
///
/// It can be used as the data itself. The rows past [`valid`](Batch::valid) are duplicates of
/// samples that some rank has in this epoch anyway; they keep the ranks in step and must not be
/// counted by a metric.
#[derive(Clone, Debug)]
pub struct Batch<T> {
    data: T,
    index: usize,
    last: bool,
    /// The rank that this batch is for; `None` when it holds a whole round.
    rank: Option<usize>,
    round: Round,
}

impl<T> Batch<T> {
    /// A batch with all that is known of it; for a loader of one's own, or data that another process
    /// read. `rank` is the rank that the data are for, `None` when they hold a whole round.
    #[must_use]
    pub fn from_parts(
        data: T,
        index: usize,
        last: bool,
        rank: Option<usize>,
        round: Round,
    ) -> Self {
        Self { data, index, last, rank, round }
    }

    /// The data alone.
    #[must_use]
    pub fn into_data(self) -> T {
        self.data
    }

    /// The same batch with other data, as after a move to a device.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn try_map<U, E>(self, f: impl FnOnce(T) -> Result<U, E>) -> Result<Batch<U>, E> {
        let Self { data, index, last, rank, round } = self;
        Ok(Batch { data: f(data)?, index, last, rank, round })
    }

    /// The batch's number in the epoch, from 0; batches that were skipped count.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether no batch follows for this rank. Known before the batch is given out, so that the
    /// last step of an epoch can be treated as such.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.last
    }

    /// Rows of the batch, duplicates included.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self.rank {
            Some(rank) => self.round.rows.get(rank).copied().unwrap_or_default(),
            None => self.round.rows.iter().sum(),
        }
    }

    /// Rows that are real: this rank's first so many. In a dispatcher's batch, which holds all
    /// ranks' rows, [`Round::valid_ranges`] says which they are.
    #[must_use]
    pub fn valid(&self) -> usize {
        match self.rank {
            Some(rank) => self.round.valid.get(rank).copied().unwrap_or_default(),
            None => self.round.total_valid(),
        }
    }

    /// Rows and valid rows of this round on all ranks, known without a message.
    #[must_use]
    pub fn round(&self) -> &Round {
        &self.round
    }
}

impl<T: TensorTree> Batch<T> {
    /// The rows that belong to `rank`, of a dispatcher's batch: views, not copies.
    ///
    /// # Errors
    /// When this batch does not hold a whole round, when the rank does not exist, or when a tensor
    /// has not one row for each sample.
    pub fn part(&self, rank: usize) -> Result<T::Owned> {
        let world = self.round.rows.len();
        if self.rank.is_some() || rank >= world {
            let message = match self.rank {
                Some(own) => format!("the batch belongs to rank {own} alone: it has no parts"),
                None => {
                    format!("rank {rank} does not exist among {}", counted(world, "rank"))
                }
            };
            return Err(DataError::Options { message }.into());
        }
        let start: usize = self.round.rows[..rank].iter().sum();
        let (total, rows) = (self.rows(), self.round.rows[rank]);
        self.data.try_map(&mut |tensor| {
            let found = tensor.size().first().copied();
            if found != Some(total as i64) {
                let message = format!(
                    "a tensor of shape {:?} cannot be dealt out to {}: expected {}, one for each sample",
                    tensor.size(),
                    counted(world, "rank"),
                    counted(total, "row")
                );
                return Err(DataError::Options { message }.into());
            }
            Ok(tensor.f_narrow(0, start as i64, rows as i64)?)
        })
    }
}

impl<T> Deref for Batch<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.data
    }
}

impl<T> DerefMut for Batch<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.data
    }
}
