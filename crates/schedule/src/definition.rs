//! What sets an optimizer's rates, as a checkpoint says it.

use serde::{Deserialize, Serialize};

use super::{LrSchedule, Plateau, Schedule};

/// What sets the rates of an optimizer's groups: a checkpoint keeps it beside the step, so that a conversion
/// knows which scheduler of PyTorch goes on with it. A load does not use it: the program makes its schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Definition {
    /// One schedule for all groups, each of which keeps its ratio to the optimizer's rate.
    All(Described),
    /// For the parameters that no group matches, and for each group.
    Groups(Vec<Described>),
    /// What follows a metric.
    Plateau(Plateau),
}

/// A schedule, as far as a file can hold it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Described {
    /// One of this crate's.
    Known(Schedule),
    /// A function of the program's own.
    Function {
        /// Whether it sets a momentum, too.
        momentum: bool,
    },
}

impl Described {
    /// Describes a schedule.
    #[must_use]
    pub fn of(schedule: &dyn LrSchedule) -> Self {
        match schedule.definition() {
            Some(known) => Self::Known(known),
            None => Self::Function { momentum: schedule.momentum(0).is_some() },
        }
    }
}
