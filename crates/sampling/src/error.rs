//! Errors of the inputs from which a plan is made.

/// Error of a plan that cannot be made. All of these are caused by the caller's input; the message contains what to
/// change.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A size is 0 that must be at least 1.
    #[error("the {what} is 0: it must be at least 1")]
    Zero {
        /// Name of the size.
        what: &'static str,
    },

    /// The product of the sizes overflows a 64-bit count.
    #[error(
        "{samples} samples in batches of {batch_size} on {world} ranks do not fit a 64-bit count"
    )]
    TooLarge {
        /// Number of samples in the epoch.
        samples: usize,
        /// Number of samples in a batch.
        batch_size: usize,
        /// World size: the number of ranks.
        world: usize,
    },

    /// The rank is not below the world size.
    #[error("rank {rank} does not exist among {world} ranks: ranks go from 0 to {}", .world.saturating_sub(1))]
    RankOutOfRange {
        /// The rank that was requested.
        rank: usize,
        /// World size: the number of ranks.
        world: usize,
    },

    /// `split_batches` with a batch size that is not a multiple of the world size.
    #[error(
        "split_batches cuts each batch into one piece per rank, but a batch size of {batch_size} does not divide by {world} ranks: use {}, or turn split_batches off so that each rank takes whole batches",
        neighbours(*.batch_size, *.world)
    )]
    SplitNotDivisible {
        /// Number of samples in a batch.
        batch_size: usize,
        /// World size: the number of ranks.
        world: usize,
    },

    /// `split_batches` with batches that have no known common size.
    #[error(
        "split_batches needs batches of one known size, and these have none: give the batch size, or turn split_batches off so that each rank takes whole batches"
    )]
    SplitWithoutBatchSize,

    /// An option that exists only in another scheme.
    #[error("{option} has no meaning in the scheme {scheme}: leave it out, or use the scheme {of}")]
    ForeignOption {
        /// Name and value of the option.
        option: &'static str,
        /// Name of the scheme that was chosen.
        scheme: &'static str,
        /// Name of the scheme that has the option.
        of: &'static str,
    },

    /// A scheme that distributes samples was chosen for batches or a stream. Only
    /// [`Scheme::Accelerate`](crate::Scheme::Accelerate) distributes batches and streams.
    #[error("the scheme {scheme} deals out samples, not {what}: use the scheme accelerate")]
    SchemeNeedsOrder {
        /// Name of the scheme that was chosen.
        scheme: &'static str,
        /// Name of what was to be distributed, such as "streams".
        what: &'static str,
    },

    /// A batch without samples.
    #[error("batch {index} is empty: a batch needs at least one sample")]
    EmptyBatch {
        /// Position of the batch in the list.
        index: usize,
    },

    /// A batch whose size differs from the declared batch size.
    #[error(
        "batch {index} has {rows} samples and the batch size is {batch_size}: only the last batch may be smaller; give no batch size when batches vary"
    )]
    RaggedBatch {
        /// Position of the batch in the list.
        index: usize,
        /// Number of samples in the batch.
        rows: usize,
        /// The declared batch size.
        batch_size: usize,
    },

    /// A weight that is negative or not finite.
    #[error("the weight of sample {index} is {weight}: weights must be finite and at least 0")]
    BadWeight {
        /// Index of the sample.
        index: usize,
        /// Weight of the sample.
        weight: f64,
    },

    /// None of the weights is above 0, so no sample can be drawn.
    #[error("none of the {weights} weights is above 0: no sample can be drawn")]
    NoWeight {
        /// Number of weights given.
        weights: usize,
    },

    /// The sum of the weights overflows.
    #[error("the sum of the {weights} weights is infinite: scale them down")]
    WeightOverflow {
        /// Number of weights given.
        weights: usize,
    },

    /// More draws without replacement than samples with a weight above 0.
    #[error(
        "{num_samples} samples cannot be drawn without replacement: {available} of {weights} weights are above 0; draw at most {available}, or draw with replacement"
    )]
    TooFewWeights {
        /// Number of draws per epoch that were requested.
        num_samples: usize,
        /// Number of weights above 0.
        available: usize,
        /// Number of weights given.
        weights: usize,
    },
}

fn neighbours(batch_size: usize, world: usize) -> String {
    let below = batch_size - batch_size % world.max(1);
    match (below, below.checked_add(world)) {
        (0, _) | (_, None) => format!("{world}"),
        (below, Some(above)) => format!("{below} or {above}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_which_batch_sizes_would_split() {
        let text =
            |batch_size, world| PlanError::SplitNotDivisible { batch_size, world }.to_string();
        assert!(text(10, 4).contains("10 does not divide by 4 ranks: use 8 or 12, or turn"));
        assert!(text(3, 4).contains("use 4, or turn"));
    }
}
