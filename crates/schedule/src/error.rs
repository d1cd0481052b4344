//! Errors of a schedule's constructors.

/// Error of a schedule's constructor. All variants are mistakes in the caller's arguments, and the message contains the
/// accepted values.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A count is 0.
    #[error("the {what} is 0: it must be at least 1")]
    Zero {
        /// Name of the count.
        what: &'static str,
    },

    /// A number is out of range.
    #[error("the schedule's {what} is {value}: it must be {must}")]
    OutOfRange {
        /// Name of the number.
        what: &'static str,
        /// Value of the number.
        value: f64,
        /// Description of the accepted range.
        must: &'static str,
    },

    /// Steps are not in ascending order.
    #[error("the schedule's {what} must rise: {after} does not come after {before}")]
    NotRising {
        /// Name of the list of steps.
        what: &'static str,
        /// The preceding step in the list.
        before: u64,
        /// The step that does not follow `before`.
        after: u64,
    },

    /// The numbers of a sequence's schedules and milestones do not match.
    #[error(
        "a sequence of {schedules} schedules needs {} milestones, the step at which each but the first begins, and has {milestones}",
        .schedules.saturating_sub(1)
    )]
    Milestones {
        /// Number of schedules in the sequence.
        schedules: usize,
        /// Number of milestones given.
        milestones: usize,
    },
}
