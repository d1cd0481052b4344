//! What can be wrong with the facts that a plan is made from.

/// A plan that cannot be made. All of these are the caller's input; the text says what to change.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A size that must be at least one.
    #[error("the {what} is 0: it must be at least 1")]
    Zero {
        /// Which size.
        what: &'static str,
    },

    /// The sizes do not fit the machine's integers when multiplied.
    #[error(
        "{samples} samples in batches of {batch_size} on {world} ranks do not fit a 64-bit count"
    )]
    TooLarge {
        /// Samples in the epoch.
        samples: usize,
        /// Samples in a batch.
        batch_size: usize,
        /// Number of ranks.
        world: usize,
    },

    /// A rank outside the world.
    #[error("rank {rank} does not exist among {world} ranks: ranks go from 0 to {}", .world.saturating_sub(1))]
    RankOutOfRange {
        /// The rank asked for.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },

    /// Splitting needs equal pieces.
    #[error(
        "split_batches cuts each batch into one piece per rank, but a batch size of {batch_size} does not divide by {world} ranks: use {}, or turn split_batches off so that each rank takes whole batches",
        neighbours(*.batch_size, *.world)
    )]
    SplitNotDivisible {
        /// Samples in a batch.
        batch_size: usize,
        /// Number of ranks.
        world: usize,
    },

    /// Splitting batches of which no common size is known.
    #[error(
        "split_batches needs batches of one known size, and these have none: give the batch size, or turn split_batches off so that each rank takes whole batches"
    )]
    SplitWithoutBatchSize,

    /// An option that another scheme has.
    #[error("{option} has no meaning in the scheme {scheme}: leave it out, or use the scheme {of}")]
    ForeignOption {
        /// The option and its value.
        option: &'static str,
        /// The scheme asked for.
        scheme: &'static str,
        /// The scheme that has the option.
        of: &'static str,
    },

    /// Torch and fastai index_sharding out samples; only Accelerate deals out batches and streams.
    #[error("the scheme {scheme} deals out samples, not {what}: use the scheme accelerate")]
    SchemeNeedsOrder {
        /// The scheme asked for.
        scheme: &'static str,
        /// What was to be dealt out.
        what: &'static str,
    },

    /// A batch without samples.
    #[error("batch {index} is empty: a batch needs at least one sample")]
    EmptyBatch {
        /// Its place in the list.
        index: usize,
    },

    /// A batch of another size than the one that was declared.
    #[error(
        "batch {index} has {rows} samples and the batch size is {batch_size}: only the last batch may be smaller; give no batch size when batches vary"
    )]
    RaggedBatch {
        /// Its place in the list.
        index: usize,
        /// Its samples.
        rows: usize,
        /// The declared size.
        batch_size: usize,
    },

    /// A weight that is negative or not finite.
    #[error("the weight of sample {index} is {weight}: weights must be finite and at least 0")]
    BadWeight {
        /// The sample.
        index: usize,
        /// Its weight.
        weight: f64,
    },

    /// No sample can be drawn.
    #[error("none of the {weights} weights is above 0: no sample can be drawn")]
    NoWeight {
        /// Number of weights.
        weights: usize,
    },

    /// The sum of the weights overflows.
    #[error("the sum of the {weights} weights is infinite: scale them down")]
    WeightOverflow {
        /// Number of weights.
        weights: usize,
    },

    /// More draws without replacement than there are samples to draw.
    #[error(
        "{num_samples} samples cannot be drawn without replacement: {available} of {weights} weights are above 0; draw at most {available}, or draw with replacement"
    )]
    TooFewWeights {
        /// Draws asked for.
        num_samples: usize,
        /// Weights above zero.
        available: usize,
        /// Number of weights.
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
