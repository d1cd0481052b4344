//! What can be wrong with settings of Accelerate's or DeepSpeed's.

use brigade_rank_env::text::escaped;

use crate::ShardingError;

/// Settings that cannot be used. Nothing was changed when one of these is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A text that is not a DeepSpeed configuration.
    #[error("{}: not a DeepSpeed configuration: {}", escaped(.origin), escaped(.message))]
    Syntax {
        /// Where the text is from.
        origin: String,
        /// What the parser found.
        message: String,
    },

    /// A key that is there twice.
    #[error("{}: duplicate key `{}`", escaped(.origin), escaped(.key))]
    Duplicate {
        /// Where it is.
        origin: String,
        /// The key.
        key: String,
    },

    /// A key that neither Accelerate nor DeepSpeed has.
    #[error("{}: unknown key `{}`{}", escaped(.origin), escaped(.key), hint.map(|it| format!(": did you mean `{it}`?")).unwrap_or_default())]
    UnknownKey {
        /// Where it is.
        origin: String,
        /// The key.
        key: String,
        /// The key that may be meant.
        hint: Option<&'static str>,
    },

    /// A value that its key cannot have.
    #[error("{}: {} is {}, expected {expected}", escaped(.origin), escaped(.key), escaped(.value))]
    Value {
        /// Where it is.
        origin: String,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What was expected.
        expected: String,
    },

    /// A value that asks for what Brigade does not do.
    #[error("{}: {} = {} is not supported: {reason}", escaped(.origin), escaped(.key), escaped(.value))]
    Unsupported {
        /// Where it is.
        origin: String,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it would have meant, and what to do.
        reason: String,
    },

    /// A key that must be there.
    #[error("{}: {key} is missing: {remedy}", escaped(.origin))]
    Missing {
        /// Where it should be.
        origin: String,
        /// The key.
        key: &'static str,
        /// What to do.
        remedy: &'static str,
    },

    /// A value `auto` that nothing gives a value.
    #[error("{}: {} is auto, and {reason}: write a value", escaped(.origin), escaped(.key))]
    Auto {
        /// Where it is.
        origin: String,
        /// The key.
        key: String,
        /// Why it has no value.
        reason: &'static str,
    },

    /// Two settings that exclude each other.
    #[error("{} and {} exclude each other: {remedy}", escaped(.first), escaped(.second))]
    Contradiction {
        /// One, and where it is.
        first: String,
        /// The other, and where it is.
        second: String,
        /// What to do.
        remedy: &'static str,
    },

    /// Batch sizes that do not fit each other.
    #[error(
        "{}: train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps \
         {steps} x {ranks} ranks, which is {}: change one of them, or write \"auto\"",
        escaped(.origin), product(&[*micro, *steps, *ranks])
    )]
    Batch {
        /// Where they are.
        origin: String,
        /// Samples of all ranks in a step.
        train: u64,
        /// Samples of one rank in a forward.
        micro: u64,
        /// Forwards in a step.
        steps: u64,
        /// Ranks with data of their own.
        ranks: u64,
    },

    /// Sizes that do not arrange the ranks of the job.
    #[error("{}: {source}", escaped(.origin))]
    Mesh {
        /// Where they are.
        origin: String,
        /// What is wrong with them.
        source: ShardingError,
    },
}

fn product(factors: &[u64]) -> u128 {
    factors.iter().fold(1, |all: u128, factor| all.saturating_mul(u128::from(*factor)))
}
