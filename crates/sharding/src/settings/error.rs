//! Errors in settings of Accelerate, DeepSpeed and Megatron-LM.

use brigade_rank_env::text::escaped;

use crate::ShardingError;

/// Error of settings that cannot be used. Nothing has been changed when it is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A text that is not a DeepSpeed configuration.
    #[error("{}: not a DeepSpeed configuration: {}", escaped(.origin), escaped(.message))]
    Syntax {
        /// Source of the text, for messages.
        origin: String,
        /// Error message of the parser.
        message: String,
    },

    /// A key that occurs twice.
    #[error("{}: duplicate key `{}`", escaped(.origin), escaped(.key))]
    Duplicate {
        /// Source of the setting: a file, an environment variable or a flag.
        origin: String,
        /// Path of the key, such as `zero_optimization.stage`.
        key: String,
    },

    /// A key that neither Accelerate nor DeepSpeed has.
    #[error("{}: unknown key `{}`{}", escaped(.origin), escaped(.key), hint.map(|it| format!(": did you mean `{it}`?")).unwrap_or_default())]
    UnknownKey {
        /// Source of the setting: a file, an environment variable or a flag.
        origin: String,
        /// Path of the key, such as `zero_optimization.stage`.
        key: String,
        /// Known key with a similar name.
        hint: Option<&'static str>,
    },

    /// A value that is invalid for its key.
    #[error("{}: {} is {}, expected {expected}", escaped(.origin), escaped(.key), escaped(.value))]
    Value {
        /// Source of the setting: a file, an environment variable or a flag.
        origin: String,
        /// Path of the key, such as `zero_optimization.stage`.
        key: String,
        /// Value of the key.
        value: String,
        /// Description of the valid values.
        expected: String,
    },

    /// A value that asks for a feature that Brigade does not have.
    #[error("{}: {} = {} is not supported: {reason}", escaped(.origin), escaped(.key), escaped(.value))]
    Unsupported {
        /// Source of the setting: a file, an environment variable or a flag.
        origin: String,
        /// Path of the key, such as `zero_optimization.stage`.
        key: String,
        /// Value of the key.
        value: String,
        /// Meaning of the value, and the change to make.
        reason: String,
    },

    /// A required key that is missing.
    #[error("{}: {key} is missing: {remedy}", escaped(.origin))]
    Missing {
        /// Source in which the key is missing.
        origin: String,
        /// Path of the key, such as `zero_optimization.stage`.
        key: &'static str,
        /// Change that resolves the error.
        remedy: &'static str,
    },

    /// A key whose value is `auto`, and for which no value is known.
    #[error("{}: {} is auto, and {reason}: write a value", escaped(.origin), escaped(.key))]
    Auto {
        /// Source of the setting: a file, an environment variable or a flag.
        origin: String,
        /// Path of the key, such as `zero_optimization.stage`.
        key: String,
        /// Reason why no value is known.
        reason: &'static str,
    },

    /// Two settings that exclude each other.
    #[error("{} and {} exclude each other: {remedy}", escaped(.first), escaped(.second))]
    Contradiction {
        /// First of the two settings, with its source.
        first: String,
        /// Second of the two settings, with its source.
        second: String,
        /// Change that resolves the error.
        remedy: &'static str,
    },

    /// Batch sizes that contradict each other.
    #[error(
        "{}: train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps \
         {steps} x {ranks} ranks, which is {}: change one of them, or write \"auto\"",
        escaped(.origin), product(&[*micro, *steps, *ranks])
    )]
    Batch {
        /// Source of the sizes: a file, an environment variable or a flag.
        origin: String,
        /// Number of samples of all ranks per optimizer step.
        train: u64,
        /// Number of samples of one rank per forward pass.
        micro: u64,
        /// Number of forward passes per optimizer step.
        steps: u64,
        /// Number of ranks that read different samples.
        ranks: u64,
    },

    /// Sizes of axes that do not fit the world size.
    #[error("{}: {source}", escaped(.origin))]
    Mesh {
        /// Source of the sizes: a file, an environment variable or a flag.
        origin: String,
        /// Error of the mesh with these sizes.
        source: ShardingError,
    },
}

fn product(factors: &[u64]) -> u128 {
    factors.iter().fold(1, |all: u128, factor| all.saturating_mul(u128::from(*factor)))
}
