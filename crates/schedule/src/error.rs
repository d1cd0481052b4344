//! What can be wrong with the numbers of a schedule.

/// A schedule that cannot be made. All of these are the caller's input; the text says what to change.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A count that must be at least one.
    #[error("the {what} is 0: it must be at least 1")]
    Zero {
        /// Which count.
        what: &'static str,
    },

    /// A number out of range.
    #[error("the schedule's {what} is {value}: it must be {must}")]
    OutOfRange {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: f64,
        /// What it has to be.
        must: &'static str,
    },

    /// Steps that must each come after the one before.
    #[error("the schedule's {what} must rise: {after} does not come after {before}")]
    NotRising {
        /// Which steps.
        what: &'static str,
        /// The one before.
        before: u64,
        /// The one that does not come after it.
        after: u64,
    },

    /// A sequence whose schedules and milestones do not match.
    #[error(
        "a sequence of {schedules} schedules needs {} milestones, the step at which each but the first begins, and has {milestones}",
        .schedules.saturating_sub(1)
    )]
    Milestones {
        /// Schedules in the sequence.
        schedules: usize,
        /// Milestones given.
        milestones: usize,
    },
}
