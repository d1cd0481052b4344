//! Errors of a process's place among the ranks.

use crate::WorldSize;

/// Error in the variables that describe a process's place in the job, set by a launcher or by hand.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// The number of ranks is 0 or does not fit a C `int`.
    #[error("a world size of {size} is not possible: expected 1 to {max} ranks", max = i32::MAX)]
    WorldSizeOutOfRange {
        /// Requested number of ranks.
        size: usize,
    },
    /// A rank is not below the number of ranks.
    #[error("{kind} {index} is out of range: expected less than the number of ranks, {size}")]
    RankOutOfRange {
        /// Kind of rank, for the message.
        kind: &'static str,
        /// Rank that is out of range.
        index: usize,
        /// Number of ranks in the group.
        size: WorldSize,
    },
    /// The value of a variable is not a number of the expected kind.
    #[error("{name}={value:?} is not {expected}")]
    NotANumber {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Expected kind of number, for the message.
        expected: &'static str,
    },
    /// A variable is set that needs another one, and the other one is not set.
    #[error("{present}={value:?} is set but {missing} is not: {help}")]
    Missing {
        /// Name of the variable that is set.
        present: &'static str,
        /// Value of the variable that is set.
        value: String,
        /// Name of the variable that is missing.
        missing: &'static str,
        /// Advice for the user: the next thing to do.
        help: &'static str,
    },
    /// The values of two variables contradict each other.
    #[error("{name}={value} and {other}={other_value} contradict each other: {rule}")]
    Contradiction {
        /// Name of the first variable.
        name: &'static str,
        /// Value of the first variable.
        value: usize,
        /// Name of the second variable.
        other: &'static str,
        /// Value of the second variable.
        other_value: usize,
        /// Condition that the two values violate.
        rule: &'static str,
    },
    /// The value of a scheduler's variable cannot be used.
    #[error("{name}={value:?} {problem}")]
    Unusable {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Reason why the value cannot be used, and what to do.
        problem: String,
    },
    /// The ranks are on several hosts, and no variable has the address of rank 0.
    #[error(
        "{launcher} started {size} ranks on several hosts without the address of rank 0: {help}"
    )]
    NoAddress {
        /// Launcher that started the ranks.
        launcher: &'static str,
        /// Number of ranks in the job.
        size: usize,
        /// Advice for the user: the next thing to do.
        help: &'static str,
    },
    /// The ranks are spread unevenly over hosts, so a rank cannot determine its host's number.
    #[error(
        "{launcher} started {size} ranks, {local_size} of them on this host, without the number of this \
         host: give each host the same number of ranks, in order (`--map-by slot` or \
         `-ppn N`), or start one `brigade launch` per host"
    )]
    UnevenHosts {
        /// Launcher that started the ranks.
        launcher: &'static str,
        /// Number of ranks in the job.
        size: usize,
        /// Number of ranks on this host.
        local_size: usize,
    },
}
