//! Pipeline schedules: orders in which the passes of a pipeline run.

use std::fmt;
use std::str::FromStr;

use super::PipelineError;

/// Pipeline schedule: the order of the forward and backward passes of each rank.
///
/// In the following, `p` is the number of ranks, `m` the number of micro-batches, and `v` the number of stages per rank
/// (chunks).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forward passes, then all backward passes (GPipe, arXiv 1811.06965): `gpipe`. Holds `m` activations.
    GPipe,
    /// One forward and one backward pass in turn, after `p - 1 - r` forward passes on rank `r` (PipeDream-Flush, arXiv
    /// 2006.09503): `1f1b`. Takes as long as GPipe, and holds at most `p - r` activations.
    OneForwardOneBackward,
    /// Interleaved 1F1B: rank `r` has the stages `r`, `r + p`, … (arXiv 2104.04473): `interleaved`. Has a smaller
    /// bubble than 1F1B, and `v` times as many messages.
    Interleaved,
    /// Looped breadth-first schedule: the stages of [`Schedule::Interleaved`], with all micro-batches of a stage before
    /// the next stage (arXiv 2211.05953): `looped-bfs`.
    LoopedBfs,
    /// 1F1B with the gradients of weights as separate passes, which fill the bubble (ZB-H1 of arXiv 2401.10241):
    /// `zb-h1`. Has a third of the bubble of 1F1B, and holds at most `p` activations.
    ZeroBubble,
    /// Gradients of weights as separate passes, and stages in the form of a V: rank `r` has the stages `r` and `2 p - 1
    /// - r` (ZB-V of arXiv 2401.10241): `zbv`. Holds at most `2 p` activations of stages, which have half the layers.
    ZeroBubbleV,
}

impl Schedule {
    /// All pipeline schedules.
    pub const ALL: [Self; 6] = [
        Self::GPipe,
        Self::OneForwardOneBackward,
        Self::Interleaved,
        Self::LoopedBfs,
        Self::ZeroBubble,
        Self::ZeroBubbleV,
    ];

    /// Returns the name of the schedule, which `FromStr` parses: `1f1b`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved => "interleaved",
            Self::LoopedBfs => "looped-bfs",
            Self::ZeroBubble => "zb-h1",
            Self::ZeroBubbleV => "zbv",
        }
    }

    /// Returns the minimum number of stages per rank: 2 for schedules with several stages per rank, 1 for the others.
    #[must_use]
    pub fn least_chunks(self) -> usize {
        match self {
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubble => 1,
            Self::Interleaved | Self::LoopedBfs | Self::ZeroBubbleV => 2,
        }
    }

    /// Returns the default number of micro-batches of a pipeline: four for each rank. With it 1F1B is idle for at most a
    /// quarter of the time that its ranks compute.
    #[must_use]
    pub fn default_micro_batches(ranks: usize) -> usize {
        ranks.saturating_mul(4)
    }

    /// Returns the rank that has a stage, in a pipeline of `ranks` ranks.
    ///
    /// ```
    /// use brigade_sharding::pipeline::Schedule;
    ///
    /// let ranks = |schedule: Schedule| [0, 1, 2, 3].map(|stage| schedule.rank_of(stage, 2));
    /// assert_eq!(ranks(Schedule::Interleaved), [0, 1, 0, 1]);
    /// assert_eq!(ranks(Schedule::ZeroBubbleV), [0, 1, 1, 0]);
    /// ```
    #[must_use]
    pub fn rank_of(self, stage: usize, ranks: usize) -> usize {
        let ranks = ranks.max(1);
        let place = stage % ranks;
        if self == Self::ZeroBubbleV && (stage / ranks) % 2 == 1 {
            ranks - 1 - place
        } else {
            place
        }
    }

    /// Returns the bubble of the schedule: the idle time of the ranks as a fraction of the time for which they compute.
    /// A forward pass is assumed to take as long as the gradients of the inputs, and as those of the weights, and
    /// messages to take no time.
    ///
    /// The bubble is `(p - 1) / m` for GPipe and 1F1B, a `v`th of it for interleaved 1F1B, and for looped BFS with at
    /// least `p` micro-batches, a third of it for ZB-H1, and a sixth for ZB-V. The ranks of ZB-V compute without a
    /// pause, but start one after the other; papers that measure each rank from its first pass give a bubble of 0.
    ///
    /// ```
    /// use brigade_sharding::pipeline::Schedule;
    ///
    /// assert_eq!(Schedule::OneForwardOneBackward.bubble_formula(4, 8, 1), 3.0 / 8.0);
    /// assert_eq!(Schedule::Interleaved.bubble_formula(4, 8, 2), 3.0 / 16.0);
    /// ```
    #[must_use]
    pub fn bubble_formula(self, ranks: usize, micro_batches: usize, chunks: usize) -> f64 {
        let (p, m, v) = (ranks as f64, micro_batches as f64, chunks as f64);
        match self {
            Self::GPipe | Self::OneForwardOneBackward => (p - 1.0) / m,
            Self::Interleaved => (p - 1.0) / (v * m),
            // With fewer micro-batches than ranks, each further chunk waits for the last rank.
            Self::LoopedBfs => (p - 1.0 + (v - 1.0) * (p - m).max(0.0)) / (v * m),
            Self::ZeroBubble => (p - 1.0) / (3.0 * m),
            Self::ZeroBubbleV => (p - 1.0) / (6.0 * m),
        }
    }

    /// Returns the maximum number of stage activations that a rank holds at a time.
    #[must_use]
    pub fn held_limit(
        self,
        rank: usize,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> usize {
        let all = micro_batches.saturating_mul(chunks);
        let limit = match self {
            Self::GPipe | Self::LoopedBfs => all,
            Self::OneForwardOneBackward => ranks.saturating_sub(rank),
            Self::Interleaved => {
                Self::interleaved_warm_up(rank, ranks, micro_batches, chunks).saturating_add(1)
            }
            Self::ZeroBubble => ranks,
            Self::ZeroBubbleV => ranks.saturating_mul(2),
        };
        limit.min(all)
    }

    /// Returns the number of micro-batches that pass through a chunk before the next chunk, in interleaved 1F1B.
    pub(super) fn round(ranks: usize, micro_batches: usize) -> usize {
        micro_batches / (micro_batches / ranks.max(1)).max(1)
    }

    /// Returns the number of warm-up passes of a rank in interleaved 1F1B: forward passes before it alternates between
    /// forward and backward passes.
    pub(super) fn interleaved_warm_up(
        rank: usize,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> usize {
        let others = chunks.saturating_sub(1).saturating_mul(Self::round(ranks, micro_batches));
        others.saturating_add(2 * ranks.saturating_sub(rank + 1))
    }

    /// Checks that the schedule can run with these numbers of ranks, micro-batches, and stages per rank.
    ///
    /// # Errors
    /// [`PipelineError::Zero`], [`PipelineError::Chunks`], [`PipelineError::TooLarge`] and
    /// [`PipelineError::MicroBatches`], with the nearest numbers that the schedule supports.
    pub fn check(
        self,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<(), PipelineError> {
        for (number, of) in [(ranks, "ranks"), (micro_batches, "micro-batches"), (chunks, "chunks")]
        {
            if number == 0 {
                return Err(PipelineError::Zero { of });
            }
        }
        let least = self.least_chunks();
        let has_more = matches!(self, Self::Interleaved | Self::LoopedBfs);
        if chunks < least || (chunks > least && !has_more) {
            return Err(PipelineError::Chunks { schedule: self, chunks });
        }
        let stages = ranks.saturating_mul(chunks);
        if stages.saturating_mul(micro_batches) > MAX_PASSES {
            return Err(PipelineError::TooLarge { stages, micro_batches, limit: MAX_PASSES });
        }
        if !self.takes(ranks, micro_batches) {
            let below = (1..micro_batches).rev().find(|&fewer| self.takes(ranks, fewer));
            let above = (micro_batches..=micro_batches.saturating_add(2 * ranks))
                .find(|&more| self.takes(ranks, more));
            let near = below.into_iter().chain(above).collect();
            return Err(PipelineError::MicroBatches { schedule: self, ranks, micro_batches, near });
        }
        Ok(())
    }

    fn takes(self, ranks: usize, micro_batches: usize) -> bool {
        match self {
            Self::GPipe | Self::LoopedBfs => true,
            Self::OneForwardOneBackward | Self::ZeroBubble => micro_batches >= ranks,
            Self::ZeroBubbleV => micro_batches / 2 >= ranks,
            Self::Interleaved => {
                micro_batches >= ranks && micro_batches.is_multiple_of(micro_batches / ranks)
            }
        }
    }

    pub(super) fn chunks_in_words(self) -> &'static str {
        match self {
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubble => "one stage",
            Self::ZeroBubbleV => "two stages",
            Self::Interleaved | Self::LoopedBfs => "two stages or more",
        }
    }

    pub(super) fn micro_batches_in_words(self) -> &'static str {
        match self {
            Self::Interleaved => {
                "which go through a rank's stages in rounds of equal size, each of at least as many as there are ranks"
            }
            Self::ZeroBubbleV => "of which there must be at least twice as many as ranks",
            _ => "of which there must be at least as many as ranks",
        }
    }

    pub(super) fn names() -> String {
        let names = Self::ALL.map(Self::name);
        let (last, others) = names.split_last().unwrap_or((&"", &[]));
        format!("{} or {last}", others.join(", "))
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Schedule {
    type Err = PipelineError;

    fn from_str(text: &str) -> Result<Self, PipelineError> {
        let found = Self::ALL.into_iter().find(|it| it.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| PipelineError::UnknownSchedule { text: text.to_owned() })
    }
}

/// Maximum number of forward passes of a table. A mistyped number would exhaust the memory otherwise.
const MAX_PASSES: usize = 1 << 20;
