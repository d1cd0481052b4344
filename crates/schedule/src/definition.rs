//! Definition of an optimizer's learning rates in a checkpoint.

use serde::{Deserialize, Serialize};

use super::{LrSchedule, Plateau, Schedule};

/// Definition of the learning rates of an optimizer's groups. A checkpoint keeps it beside the step, so that a
/// conversion can choose the PyTorch scheduler that continues it. Loading a checkpoint does not use it: the program
/// creates its schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Definition {
    /// A single schedule for all groups, each of which keeps its ratio to the optimizer's learning rate.
    All(Described),
    /// Schedules by group: the first for the parameters that no group matches, then one for each group.
    Groups(Vec<Described>),
    /// Schedule that follows a metric.
    Plateau(Plateau),
}

/// Description of a schedule that a file can contain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Described {
    /// A schedule of this crate.
    Known(Schedule),
    /// A user-defined function.
    Function {
        /// `true` if the function sets a momentum, too.
        momentum: bool,
    },
}

impl Described {
    /// Returns the description of a schedule.
    #[must_use]
    pub fn of(schedule: &dyn LrSchedule) -> Self {
        match schedule.definition() {
            Some(known) => Self::Known(known),
            None => Self::Function { momentum: schedule.momentum(0).is_some() },
        }
    }
}
