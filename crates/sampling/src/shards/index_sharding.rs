//! Distributing an order by position: all three schemes use one arithmetic.
//!
//! A batch is a start, a stride and a number of rows: the places `start + i * stride`. Places from
//! the end of the order on wrap around to its start; they are the duplicates. Because the places of
//! a batch increase, its duplicates come last.

use super::{Scheme, ShardOptions, Totals};
use crate::{Order, PlanError, PlannedBatch};

#[derive(Debug, Clone)]
pub(super) struct IndexSharding {
    order: Order,
    layout: Layout,
    world: usize,
    /// Rows of a full batch on one rank.
    rows: usize,
    rounds: usize,
}

/// The positions in the order that each rank's batches take.
#[derive(Debug, Clone, Copy)]
enum Layout {
    /// Rounds follow each other, and the ranks follow each other within a round. The last round ends with the order
    /// instead of wrapping around if `even` is `false`.
    Rounds { even: bool },
    /// Rank `r` has the `len` positions `r`, `r + world`, and so on.
    Strided { len: usize },
    /// Rank `r` has the `len` positions from `r * len` on.
    Blocks { len: usize },
}

/// Positions of one batch in the order.
struct BatchSpan {
    start: usize,
    stride: usize,
    rows: usize,
}

impl IndexSharding {
    /// Lays out the batches of all ranks. `options` must have been checked.
    pub(super) fn new(
        order: Order,
        batch_size: usize,
        world: usize,
        options: ShardOptions,
    ) -> Result<Self, PlanError> {
        let samples = order.len();
        // Positions reach at most one round past the end, so that with this check nothing below overflows.
        world
            .checked_mul(batch_size)
            .and_then(|round| round.checked_add(world)?.checked_add(samples))
            .ok_or(PlanError::TooLarge { samples, batch_size, world })?;

        let rows = if options.split_batches { batch_size / world } else { batch_size };
        let batches = |len: usize, size| {
            if options.drop_last { len / size } else { len.div_ceil(size) }
        };
        let (layout, rounds) = match options.scheme {
            Scheme::Accelerate => {
                (Layout::Rounds { even: options.even_batches }, batches(samples, rows * world))
            }
            Scheme::Torch => {
                let len = if options.drop_tail { samples / world } else { samples.div_ceil(world) };
                (Layout::Strided { len }, batches(len, rows))
            }
            Scheme::Fastai => {
                let len = samples.div_ceil(world);
                (Layout::Blocks { len }, batches(len, rows))
            }
        };
        Ok(Self { order, layout, world, rows, rounds })
    }

    pub(super) fn rounds(&self) -> usize {
        self.rounds
    }

    pub(super) fn batch(&self, rank: usize, round: usize) -> Option<PlannedBatch> {
        let span = self.span(rank, round)?;
        let samples = self.order.len();
        let indices = (0..span.rows)
            .map(|row| {
                let place = span.start + row * span.stride;
                self.order.at(if place < samples { place } else { place % samples })
            })
            .collect();
        Some(PlannedBatch { indices, valid: self.valid(&span) })
    }

    pub(super) fn sizes(&self, rank: usize, round: usize) -> Option<(usize, usize)> {
        self.span(rank, round).map(|span| (span.rows, self.valid(&span)))
    }

    pub(super) fn totals(&self) -> Totals {
        let samples = self.order.len();
        let (rows, seen) = match self.layout {
            Layout::Rounds { even } => {
                let places = self.rounds * self.rows * self.world;
                let seen = places.min(samples);
                (if even { places } else { seen }, seen)
            }
            Layout::Strided { len } => {
                let places = len.min(self.rounds * self.rows) * self.world;
                (places, places.min(samples))
            }
            Layout::Blocks { len } => {
                let used = len.min(self.rounds * self.rows);
                let seen = (0..self.world).map(|r| used.min(samples.saturating_sub(r * len)));
                (used * self.world, seen.sum())
            }
        };
        Totals { seen, duplicated: rows - seen, dropped: samples - seen }
    }

    fn span(&self, rank: usize, round: usize) -> Option<BatchSpan> {
        if round >= self.rounds {
            return None;
        }
        let done = round * self.rows;
        let span = match self.layout {
            Layout::Rounds { even } => {
                let start = done * self.world + rank * self.rows;
                let left = self.order.len().saturating_sub(start);
                let rows = if even { self.rows } else { self.rows.min(left) };
                BatchSpan { start, stride: 1, rows }
            }
            Layout::Strided { len } => BatchSpan {
                start: done * self.world + rank,
                stride: self.world,
                rows: self.rows.min(len - done),
            },
            Layout::Blocks { len } => {
                BatchSpan { start: rank * len + done, stride: 1, rows: self.rows.min(len - done) }
            }
        };
        (span.rows > 0).then_some(span)
    }

    /// Returns the number of rows whose positions lie within the order.
    fn valid(&self, span: &BatchSpan) -> usize {
        self.order.len().saturating_sub(span.start).div_ceil(span.stride).min(span.rows)
    }
}
