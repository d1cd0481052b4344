//! Errors of a process's place among the ranks.

use crate::WorldSize;

/// Variables, set by a launcher or by hand, that describe an impossible world.
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
    /// What a scheduler says in one variable cannot be used.
    #[error("{name}={value:?} {problem}")]
    Unusable {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// Why it cannot be used, and what to do.
        problem: String,
    },
    /// Ranks on several hosts, and nothing says where rank 0 is.
    #[error(
        "{launcher} started {size} ranks on several hosts and does not tell them where rank 0 is: \
         {help}"
    )]
    NoAddress {
        /// Who started them.
        launcher: &'static str,
        /// How many.
        size: usize,
        /// The next thing to do.
        help: &'static str,
    },
    /// Ranks are spread so that none can tell which host it is on.
    #[error(
        "{launcher} started {size} ranks, {local_size} of them on this host, and does not tell \
         which host this is: give each host the same number of ranks, in order (`--map-by slot` or \
         `-ppn N`), or start one `brigade launch` per host"
    )]
    UnevenHosts {
        /// Who started them.
        launcher: &'static str,
        /// How many.
        size: usize,
        /// How many of them on this host.
        local_size: usize,
    },
}
