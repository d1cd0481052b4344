//! Errors of pipeline schedules and tables.

use std::fmt;

use brigade_rank_env::text::{counted, escaped};

use super::{Action, Schedule};
use crate::error::first_of;

/// Error of an invalid pipeline: wrong numbers, a table that would not run, or invalid costs. Each is caused by the
/// caller's input.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A text that is not a schedule.
    #[error("`{}` is not a pipeline schedule: write {}", escaped(.text), Schedule::names())]
    UnknownSchedule {
        /// Text that is not the name of a schedule.
        text: String,
    },

    /// A number of ranks, stages, micro-batches or chunks that is 0.
    #[error("the number of {of} is 0: it must be at least 1")]
    Zero {
        /// Name of the number that is 0: `ranks`, `stages`, `micro-batches` or `chunks`.
        of: &'static str,
    },

    /// A table with so many passes that it would exhaust the memory.
    #[error(
        "{stages} stages with {micro_batches} micro-batches are more than {limit} passes: take fewer"
    )]
    TooLarge {
        /// Number of stages of all ranks.
        stages: usize,
        /// Number of micro-batches per step.
        micro_batches: usize,
        /// Maximum number of stages times micro-batches.
        limit: usize,
    },

    /// A number of stages per rank that the schedule does not support.
    #[error("{schedule} has {takes} for each rank, not {chunks}", takes = .schedule.chunks_in_words())]
    Chunks {
        /// Schedule that cannot run with these numbers.
        schedule: Schedule,
        /// Number of stages per rank (chunks).
        chunks: usize,
    },

    /// A number of micro-batches that the schedule cannot run.
    #[error(
        "{schedule} on {ranks} ranks cannot run {micro_batches} micro-batches, {rule}: take {near}",
        rule = .schedule.micro_batches_in_words(), near = either(.near)
    )]
    MicroBatches {
        /// Schedule that cannot run with these numbers.
        schedule: Schedule,
        /// Number of ranks of the pipeline.
        ranks: usize,
        /// Number of micro-batches per step.
        micro_batches: usize,
        /// Nearest numbers of micro-batches that the schedule can run, below and above.
        near: Vec<usize>,
    },

    /// Lists of actions and limits of held activations with different lengths.
    #[error("the table has actions for {} and limits of held activations for {limits}",
        counted(*.ranks, "rank"))]
    Limits {
        /// Number of lists of actions, one for each rank.
        ranks: usize,
        /// Number of limits of held activations.
        limits: usize,
    },

    /// A stage on a rank that the table does not have.
    #[error("stage {stage} is on rank {rank}, and the table has {}", counted(*.ranks, "rank"))]
    StageRank {
        /// Index of the stage, from 0.
        stage: usize,
        /// Rank to which the stage is assigned.
        rank: usize,
        /// Number of ranks of the table.
        ranks: usize,
    },

    /// A rank without a stage.
    #[error("rank {rank} has no stage")]
    IdleRank {
        /// Rank that has no stage.
        rank: usize,
    },

    /// An action that is invalid at its place in the list.
    #[error("{place} {fault}")]
    Action {
        /// Place of the invalid action.
        place: Place,
        /// Fault of the action.
        fault: ActionFault,
    },

    /// An action that is missing from the list of its rank.
    #[error("rank {rank} has no {action}")]
    Missing {
        /// Rank that has the stage of the action.
        rank: usize,
        /// Action that is missing.
        action: Action,
    },

    /// A deadlock: messages that wait for each other, if a send ends only when its receive has begun.
    #[error("{} wait for each other without end", joined(.waits, " and "))]
    Deadlock {
        /// Message at which each rank of the cycle waits, in order: each rank waits for the next one of the list.
        waits: Vec<Place>,
    },

    /// The number of stages that have costs differs from the table's.
    #[error("there are costs for {}, and the table has {stages}", counted(*.given, "stage"))]
    CostsOfStages {
        /// Number of stages that have costs.
        given: usize,
        /// Number of stages of the table.
        stages: usize,
    },

    /// A time or a cost that is negative or not finite.
    #[error("the {of} is {value}: it must be a finite number and not below 0")]
    Cost {
        /// Name of the invalid value, such as `time of a message`.
        of: String,
        /// Time or cost that is negative or not finite.
        value: f64,
    },

    /// Fewer layers than stages.
    #[error("{layers} layers cannot be cut into {stages} stages, each with at least one")]
    FewLayers {
        /// Number of layers of the model.
        layers: usize,
        /// Number of stages to divide the layers into.
        stages: usize,
    },

    /// A name of a stage's first layer that no layer has.
    #[error("there is no layer {} at which a stage could begin; there are {}", escaped(.name), first_of(.known))]
    NoSuchLayer {
        /// Name of the layer.
        name: String,
        /// Names of the layers, the most similar ones first.
        known: Vec<String>,
    },

    /// A name that two layers have.
    #[error("two layers have the name {}", escaped(.name))]
    DuplicateLayer {
        /// Name of the layer.
        name: String,
    },

    /// A stage whose first layer is not behind that of the stage before.
    #[error(
        "a stage cannot begin at {}: {}; name the first layers of all stages but the first, in the order of the layers",
        escaped(.name),
        match .after { Some(after) => format!("it does not come after {}", escaped(after)), None => "it is the first layer".to_owned() }
    )]
    CutOrder {
        /// Name of the layer.
        name: String,
        /// Name of the first layer of the stage before. `None` if `name` is the first layer of the model.
        after: Option<String>,
    },
}

/// Place of an action in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Rank that executes the action.
    pub rank: usize,
    /// Index in the rank's list, from 0.
    pub position: usize,
    /// Action at this place.
    pub action: Action,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, action {} ({})", self.rank, self.position, self.action)
    }
}

/// Fault of an action at its place in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ActionFault {
    /// A stage that the table does not have.
    #[error("belongs to a stage that does not exist: there are {stages}")]
    NoSuchStage {
        /// Number of stages of the table.
        stages: usize,
    },
    /// A micro-batch that does not exist, one that is missing, or one of an action that belongs to a whole step.
    #[error("must have a micro-batch below {micro_batches} if it handles one, and none otherwise")]
    MicroBatch {
        /// Number of micro-batches per step.
        micro_batches: usize,
    },
    /// A stage that another rank has.
    #[error("belongs to a stage of rank {owner}")]
    WrongRank {
        /// Rank that has the stage.
        owner: usize,
    },
    /// A message that has no other rank as its peer: the neighbouring stage is on the same rank, or does not exist.
    #[error("has no other rank as its peer")]
    NoPeer,
    /// An action that repeats the work of an earlier one.
    #[error("repeats action {position} ({action})")]
    Repeated {
        /// Index of the earlier action in the rank's list.
        position: usize,
        /// Earlier action that does the same work.
        action: Action,
    },
    /// An action that comes before one of its dependencies.
    #[error("must come after {needs}, which is not before it in the list")]
    Early {
        /// Action that must come first.
        needs: Action,
    },
    /// A forward pass that exceeds the rank's limit of held activations.
    #[error("would hold {held} activations, and the rank's limit is {limit}")]
    Held {
        /// Number of activations that the rank would hold.
        held: usize,
        /// Maximum number of activations that the rank may hold.
        limit: usize,
    },
    /// A send without its receive, or a receive without its send.
    #[error("has no {counterpart} on rank {peer}")]
    Unmatched {
        /// Rank that should have the other half.
        peer: usize,
        /// Missing half of the message.
        counterpart: Action,
    },
    /// A receive that is not in the order in which the other rank sends.
    #[error("is not in the order of rank {peer}, which sends {sent} first")]
    Reordered {
        /// Rank that sends the message.
        peer: usize,
        /// Message that the peer sends at this place of the order.
        sent: Action,
    },
}

fn joined(places: &[Place], between: &str) -> String {
    let places: Vec<_> = places.iter().map(ToString::to_string).collect();
    places.join(between)
}

/// Joins numbers with "or": `8 or 12`.
fn either(numbers: &[usize]) -> String {
    let numbers: Vec<_> = numbers.iter().map(ToString::to_string).collect();
    numbers.join(" or ")
}
