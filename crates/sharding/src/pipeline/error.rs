//! What can be wrong with a pipeline.

use std::fmt;

use brigade_rank_env::text::{counted, escaped};

use super::{Action, Schedule};
use crate::error::first_of;

/// A pipeline that cannot be made or would not run. All of these are the caller's input.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A text that is not a schedule.
    #[error("`{}` is not a pipeline schedule: write {}", escaped(.text), Schedule::names())]
    UnknownSchedule {
        /// The text.
        text: String,
    },

    /// A number that is 0.
    #[error("the number of {of} is 0: it must be at least 1")]
    Zero {
        /// What is counted.
        of: &'static str,
    },

    /// A table that would fill the memory.
    #[error(
        "{stages} stages with {micro_batches} micro-batches are more than {limit} passes: take fewer"
    )]
    TooLarge {
        /// Stages of all ranks.
        stages: usize,
        /// Micro-batches of a step.
        micro_batches: usize,
        /// The largest product of both.
        limit: usize,
    },

    /// A number of chunks that the schedule does not have.
    #[error("{schedule} has {takes} for each rank, not {chunks}", takes = .schedule.chunks_in_words())]
    Chunks {
        /// The schedule.
        schedule: Schedule,
        /// Stages of a rank.
        chunks: usize,
    },

    /// A number of micro-batches that the schedule cannot run.
    #[error(
        "{schedule} on {ranks} ranks cannot run {micro_batches} micro-batches, {rule}: take {near}",
        rule = .schedule.micro_batches_in_words(), near = either(.near)
    )]
    MicroBatches {
        /// The schedule.
        schedule: Schedule,
        /// Ranks of the pipeline.
        ranks: usize,
        /// Micro-batches of a step.
        micro_batches: usize,
        /// The nearest numbers that it can run, below and above.
        near: Vec<usize>,
    },

    /// Lists of a table with different lengths.
    #[error("the table has actions for {} and limits of held activations for {limits}",
        counted(*.ranks, "rank"))]
    Limits {
        /// Lists of actions.
        ranks: usize,
        /// Limits.
        limits: usize,
    },

    /// A stage on a rank that the table does not have.
    #[error("stage {stage} is on rank {rank}, and the table has {}", counted(*.ranks, "rank"))]
    StageRank {
        /// The stage.
        stage: usize,
        /// Its rank.
        rank: usize,
        /// Ranks of the table.
        ranks: usize,
    },

    /// A rank without a stage.
    #[error("rank {rank} has no stage")]
    IdleRank {
        /// The rank.
        rank: usize,
    },

    /// An action that cannot be where it is.
    #[error("{place} {fault}")]
    Action {
        /// The action.
        place: Place,
        /// What is wrong with it.
        fault: ActionFault,
    },

    /// An action that is in no list.
    #[error("rank {rank} has no {action}")]
    Missing {
        /// The rank that has the stage.
        rank: usize,
        /// The action.
        action: Action,
    },

    /// Messages that wait for each other, where a send ends when its receive has begun.
    #[error("{} wait for each other without end", joined(.waits, " and "))]
    Deadlock {
        /// The message at which each rank of the circle waits, for the next of the list.
        waits: Vec<Place>,
    },

    /// Costs for another number of stages.
    #[error("there are costs for {}, and the table has {stages}", counted(*.given, "stage"))]
    CostsOfStages {
        /// Stages with costs.
        given: usize,
        /// Stages of the table.
        stages: usize,
    },

    /// A time or a cost that is negative or not finite.
    #[error("the {of} is {value}: it must be a finite number and not below 0")]
    Cost {
        /// What costs it.
        of: String,
        /// The value.
        value: f64,
    },

    /// Fewer layers than stages.
    #[error("{layers} layers cannot be cut into {stages} stages, each with at least one")]
    FewLayers {
        /// Number of layers.
        layers: usize,
        /// Number of stages.
        stages: usize,
    },

    /// A name at which to cut that no layer has.
    #[error("there is no layer {} at which a stage could begin; there are {}", escaped(.name), first_of(.known))]
    NoSuchLayer {
        /// The name.
        name: String,
        /// Names of layers, the most similar first.
        known: Vec<String>,
    },

    /// A name that two layers have.
    #[error("two layers have the name {}", escaped(.name))]
    DuplicateLayer {
        /// The name.
        name: String,
    },

    /// A cut that is not behind the one before.
    #[error(
        "a stage cannot begin at {}: {}; name the first layers of all stages but the first, in the order of the layers",
        escaped(.name),
        match .after { Some(after) => format!("it does not come after {}", escaped(after)), None => "it is the first layer".to_owned() }
    )]
    CutOrder {
        /// The name.
        name: String,
        /// The name of the cut before; `None` for the first layer.
        after: Option<String>,
    },
}

/// Where an action is in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// The place in the rank's list, from 0.
    pub position: usize,
    /// The action.
    pub action: Action,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, action {} ({})", self.rank, self.position, self.action)
    }
}

/// What is wrong with an action at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ActionFault {
    /// A stage that the table does not have.
    #[error("belongs to a stage that does not exist: there are {stages}")]
    NoSuchStage {
        /// Stages of the table.
        stages: usize,
    },
    /// A micro-batch that the table does not have, one where none belongs, or none where one is needed.
    #[error("must have a micro-batch below {micro_batches} if it handles one, and none otherwise")]
    MicroBatch {
        /// Micro-batches of a step.
        micro_batches: usize,
    },
    /// A stage of another rank.
    #[error("belongs to a stage of rank {owner}")]
    WrongRank {
        /// The rank that has the stage.
        owner: usize,
    },
    /// A message that would leave neither the rank nor the model.
    #[error("has no other rank as its peer")]
    NoPeer,
    /// An action that does what another one has done.
    #[error("repeats action {position} ({action})")]
    Repeated {
        /// The place of the other in the list.
        position: usize,
        /// The other.
        action: Action,
    },
    /// An action without what it depends on.
    #[error("must come after {needs}, which is not before it in the list")]
    Early {
        /// What it depends on.
        needs: Action,
    },
    /// An activation above the limit.
    #[error("would hold {held} activations, and the rank's limit is {limit}")]
    Held {
        /// Activations held with it.
        held: usize,
        /// The rank's limit.
        limit: usize,
    },
    /// A message with one half.
    #[error("has no {counterpart} on rank {peer}")]
    Unmatched {
        /// The rank of the other half.
        peer: usize,
        /// The other half.
        counterpart: Action,
    },
    /// Messages between two ranks that arrive in another order than they are received.
    #[error("is not in the order of rank {peer}, which sends {sent} first")]
    Reordered {
        /// The rank that sends.
        peer: usize,
        /// What the peer sends at this place of the order.
        sent: Action,
    },
}

fn joined(places: &[Place], between: &str) -> String {
    let places: Vec<_> = places.iter().map(ToString::to_string).collect();
    places.join(between)
}

/// `8 or 12`
fn either(numbers: &[usize]) -> String {
    let numbers: Vec<_> = numbers.iter().map(ToString::to_string).collect();
    numbers.join(" or ")
}
