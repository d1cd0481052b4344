//! A batch and its position among all batches.

use std::ops::{Deref, DerefMut};

use brigade_rank_env::text::counted;
use brigade_sampling::Round;
use brigade_torch::{Result, TensorTree};

use crate::DataError;

/// The batch of one rank, with the number of its valid rows.
///
/// It dereferences to its data. The rows past [`valid`](Batch::valid) are duplicates of samples that some rank has in
/// this epoch anyway; they keep the ranks in step, and a metric must not count them.
#[derive(Clone, Debug)]
pub struct Batch<T> {
    data: T,
    index: usize,
    last: bool,
    /// The rank to which this batch belongs; `None` if it holds a whole round.
    rank: Option<usize>,
    round: Round,
}

impl<T> Batch<T> {
    /// Creates a batch from its data and position, for a custom loader or for data that another process read. `rank` is
    /// the rank to which the data belong, `None` if they hold a whole round.
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

    /// Returns the data without the position.
    #[must_use]
    pub fn into_data(self) -> T {
        self.data
    }

    /// Replaces the data by the result of `f`, for example to move them to a device.
    ///
    /// # Errors
    /// Returns the error of `f`.
    pub fn try_map<U, E>(self, f: impl FnOnce(T) -> Result<U, E>) -> Result<Batch<U>, E> {
        let Self { data, index, last, rank, round } = self;
        Ok(Batch { data: f(data)?, index, last, rank, round })
    }

    /// Returns the number of the batch in the epoch, from 0. Skipped batches are counted.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns `true` if this is the last batch of the epoch for this rank. Known as soon as the batch is returned, so
    /// that the last step of an epoch can be handled as such.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.last
    }

    /// Returns the number of rows of the batch, duplicates included.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self.rank {
            Some(rank) => self.round.rows.get(rank).copied().unwrap_or_default(),
            None => self.round.rows.iter().sum(),
        }
    }

    /// Returns the number of valid rows, which are the first rows of the batch. In a dispatcher's batch, which holds
    /// the rows of all ranks, [`Round::valid_ranges`] gives their positions.
    #[must_use]
    pub fn valid(&self) -> usize {
        match self.rank {
            Some(rank) => self.round.valid.get(rank).copied().unwrap_or_default(),
            None => self.round.total_valid(),
        }
    }

    /// Returns the numbers of rows and valid rows of this round on all ranks, which are known without communication.
    #[must_use]
    pub fn round(&self) -> &Round {
        &self.round
    }
}

impl<T: TensorTree> Batch<T> {
    /// Returns the rows that belong to `rank` from a dispatcher's batch, as views.
    ///
    /// # Errors
    /// Fails if this batch does not hold a whole round, the rank is not below the world size, or a tensor does not have
    /// one row for each sample.
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
