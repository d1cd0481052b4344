//! The actions of all ranks in a step.

use super::{Action, ActionKind};

/// Table of the actions of each rank of a pipeline in one step, in the order of execution: passes, messages, and the
/// gathers, frees and reductions of sharded parameters.
///
/// A table has passed the checks of [`PipelineTable::from_actions`], so ranks that execute their lists one action after
/// the other do not deadlock. This holds even if a send ends only when its receive has begun (a rendezvous, as in NCCL
/// without buffers), and so for each transport that keeps the order of messages between two ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineTable {
    pub(super) micro_batches: usize,
    pub(super) stage_ranks: Vec<usize>,
    pub(super) held_limits: Vec<usize>,
    pub(super) actions: Vec<Vec<Action>>,
    /// All actions in topological order: each comes after its dependencies.
    pub(super) order: Vec<Event>,
}

/// An action of a table, by its rank and its index in the rank's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Event {
    pub(super) rank: usize,
    pub(super) position: usize,
}

impl PipelineTable {
    /// Returns the number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// Returns the number of stages of all ranks.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stage_ranks.len()
    }

    /// Returns the number of micro-batches of a step.
    #[must_use]
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Returns the rank that has each stage.
    #[must_use]
    pub fn stage_ranks(&self) -> &[usize] {
        &self.stage_ranks
    }

    /// Returns the stages of a rank. Empty for a rank outside of the table.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        let stages = self.stage_ranks.iter().enumerate();
        stages.filter(move |(_, owner)| **owner == rank).map(|(stage, _)| stage)
    }

    /// Returns the actions of a rank. Empty for a rank outside of the table.
    #[must_use]
    pub fn actions(&self, rank: usize) -> &[Action] {
        self.actions.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Returns the rank to which an action sends, or from which it receives. `None` for other actions.
    #[must_use]
    pub fn peer(&self, action: Action) -> Option<usize> {
        self.stage_ranks.get(action.counterpart()?.stage).copied()
    }

    /// Returns the maximum number of stage activations that a rank holds at a time. An activation is held from the
    /// forward pass until the weight gradients of the same micro-batch are computed.
    #[must_use]
    pub fn held(&self, rank: usize) -> usize {
        let (mut held, mut most) = (0usize, 0);
        for action in self.actions(rank) {
            match action.kind {
                ActionKind::Forward => held += 1,
                ActionKind::Backward | ActionKind::BackwardWeight => held -= 1,
                _ => {}
            }
            most = most.max(held);
        }
        most
    }

    /// Returns the maximum number of activations that a rank may hold, which [`PipelineTable::held`] does not exceed. 0
    /// for a rank outside of the table.
    #[must_use]
    pub fn held_limit(&self, rank: usize) -> usize {
        self.held_limits.get(rank).copied().unwrap_or(0)
    }
}
