//! What can be wrong with a place in the world.

use crate::WorldSize;

/// A launcher, or a person who set the variables by hand, described an impossible world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// Zero ranks, or more than a C `int` counts.
    #[error("a world of {size} ranks is not possible: between 1 and {max} are", max = i32::MAX)]
    WorldSizeOutOfRange {
        /// The size that was asked for.
        size: usize,
    },
    /// A rank at or above the number of ranks.
    #[error("{kind} {index} is not below the number of ranks, {size}")]
    RankOutOfRange {
        /// Which kind of rank.
        kind: &'static str,
        /// The rank.
        index: usize,
        /// The size of its group.
        size: WorldSize,
    },
    /// A variable holds something other than a number of its kind.
    #[error("{name}={value:?} is not {expected}")]
    NotANumber {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// One variable needs another that is not set.
    #[error("{present}={value:?} is set but {missing} is not: {help}")]
    Missing {
        /// The variable that is there.
        present: &'static str,
        /// What it holds.
        value: String,
        /// The variable that is not there.
        missing: &'static str,
        /// The next thing to do.
        help: &'static str,
    },
    /// Two variables cannot both be right.
    #[error("{name}={value} and {other}={other_value} contradict each other: {rule}")]
    Contradiction {
        /// One variable.
        name: &'static str,
        /// What it holds.
        value: usize,
        /// The other variable.
        other: &'static str,
        /// What that one holds.
        other_value: usize,
        /// What would hold if both were right.
        rule: &'static str,
    },
}
