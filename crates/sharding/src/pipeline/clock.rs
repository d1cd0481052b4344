//! Simulation of a pipeline table on a clock.

use std::collections::HashMap;

use super::{Action, ActionKind, PipelineError, PipelineTable};

/// Durations of passes and messages, in any unit of time.
///
/// ```
/// use brigade_sharding::pipeline::{Costs, PipelineTable, Schedule};
///
/// let table = PipelineTable::new(Schedule::GPipe, 2, 2, 1)?;
/// let mut costs = Costs::equal(2);
/// costs.message = 0.5;
/// costs.stages[1].forward = 2.0;
/// let timeline = table.simulate(&costs)?;
/// // F0, a message, F0 and F1 of the slower stage, its B0 and B1, a message, B1.
/// assert_eq!(timeline.total, 1.0 + 0.5 + 4.0 + 4.0 + 0.5 + 2.0);
/// # Ok::<(), brigade_sharding::pipeline::PipelineError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// Durations of the passes of each stage.
    pub stages: Vec<StageCosts>,
    /// Duration of a message: from the end of a pass until another rank has the result. Both ranks can compute
    /// meanwhile.
    pub message: f64,
}

/// Durations of the passes of a stage for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageCosts {
    /// Duration of the forward pass.
    pub forward: f64,
    /// Duration of the gradients of the inputs.
    pub backward_input: f64,
    /// Duration of the gradients of the weights. [`ActionKind::Backward`] takes the sum of `backward_input` and
    /// `backward_weight`.
    pub backward_weight: f64,
}

/// Simulated timeline of one step: the start and the end of each action of each rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// Duration of the step: the time at which the last pass of all ranks ends.
    pub total: f64,
    /// Timeline of each rank.
    pub ranks: Vec<RankTimeline>,
}

/// Simulated timeline of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct RankTimeline {
    /// Actions in the order of the rank's list, with their times.
    pub spans: Vec<Span>,
    /// Total time for which the rank computes.
    pub busy: f64,
    /// Total time for which the rank is idle: the duration of the step minus `busy`.
    pub idle: f64,
}

/// An action with its start and its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Action that runs in this span.
    pub action: Action,
    /// Time at which the action begins.
    pub start: f64,
    /// Time at which the action ends. For a message, the time of its arrival.
    pub end: f64,
}

impl Costs {
    /// Returns a duration of 1 for each forward pass and each kind of gradients, and of 0 for messages.
    #[must_use]
    pub fn equal(stages: usize) -> Self {
        let stage = StageCosts { forward: 1.0, backward_input: 1.0, backward_weight: 1.0 };
        Self { stages: vec![stage; stages], message: 0.0 }
    }

    fn check(&self, stages: usize) -> Result<(), PipelineError> {
        if self.stages.len() != stages {
            return Err(PipelineError::CostsOfStages { given: self.stages.len(), stages });
        }
        check_cost(self.message, || "time of a message".to_owned())?;
        for (stage, costs) in self.stages.iter().enumerate() {
            for (cost, pass) in [
                (costs.forward, "forward pass"),
                (costs.backward_input, "gradients of the inputs"),
                (costs.backward_weight, "gradients of the weights"),
            ] {
                check_cost(cost, || format!("time of the {pass} of stage {stage}"))?;
            }
        }
        Ok(())
    }

    fn of(&self, action: Action) -> f64 {
        let costs = &self.stages[action.stage];
        match action.kind {
            ActionKind::Forward => costs.forward,
            ActionKind::Backward => costs.backward_input + costs.backward_weight,
            ActionKind::BackwardInput => costs.backward_input,
            ActionKind::BackwardWeight => costs.backward_weight,
            _ => 0.0,
        }
    }
}

pub(super) fn check_cost(value: f64, of: impl FnOnce() -> String) -> Result<(), PipelineError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(PipelineError::Cost { of: of(), value })
}

impl Timeline {
    /// Returns the bubble: the time for which the ranks are idle, as a fraction of the time for which they compute.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let sum = |time: fn(&RankTimeline) -> f64| self.ranks.iter().map(time).sum();
        part(sum(|rank| rank.idle), sum(|rank| rank.busy))
    }
}

impl RankTimeline {
    /// Returns the bubble of this rank: its idle time as a fraction of the time for which it computes.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        part(self.idle, self.busy)
    }
}

fn part(idle: f64, busy: f64) -> f64 {
    if busy > 0.0 { idle / busy } else { 0.0 }
}

impl PipelineTable {
    /// Simulates one step. Sends and receives run in the background, as with asynchronous messages: a pass waits for
    /// its input, and a send waits for nothing. Gathers and reductions of sharded parameters take no time.
    ///
    /// # Errors
    /// [`PipelineError::CostsOfStages`] if the number of stages that have costs differs from the table's, and
    /// [`PipelineError::Cost`] for a cost that is negative or not finite.
    pub fn simulate(&self, costs: &Costs) -> Result<Timeline, PipelineError> {
        costs.check(self.stages())?;
        Ok(self.run(costs))
    }

    pub(super) fn run(&self, costs: &Costs) -> Timeline {
        let idle = RankTimeline { spans: Vec::new(), busy: 0.0, idle: 0.0 };
        let mut ranks = vec![idle; self.ranks()];
        // The end of each rank's last pass, and the arrival times of inputs that are not used yet.
        let mut free = vec![0.0f64; self.ranks()];
        let mut arrived = vec![HashMap::new(); self.ranks()];
        let mut sent = 0.0f64;
        for event in &self.order {
            let rank = event.rank;
            let action = self.actions[rank][event.position];
            let (start, end) = match action.kind {
                ActionKind::SendActivation | ActionKind::SendGradient => {
                    // A gradient may be sent after a later pass: its message begins then, not at the end of its own
                    // pass.
                    sent = free[rank];
                    (sent, sent + costs.message)
                }
                ActionKind::ReceiveActivation | ActionKind::ReceiveGradient => {
                    // The receive follows its send in the order.
                    arrived[rank].insert(action, sent + costs.message);
                    (sent, sent + costs.message)
                }
                _ => {
                    let input = match action.kind {
                        ActionKind::Forward => Some(ActionKind::ReceiveActivation),
                        ActionKind::Backward | ActionKind::BackwardInput => {
                            Some(ActionKind::ReceiveGradient)
                        }
                        _ => None,
                    };
                    let input = input.and_then(|kind| arrived[rank].remove(&action.as_kind(kind)));
                    let start = free[rank].max(input.unwrap_or(0.0));
                    let cost = costs.of(action);
                    free[rank] = start + cost;
                    ranks[rank].busy += cost;
                    (start, start + cost)
                }
            };
            ranks[rank].spans.push(Span { action, start, end });
        }
        let total = free.into_iter().fold(0.0, f64::max);
        for rank in &mut ranks {
            rank.idle = total - rank.busy;
        }
        Timeline { total, ranks }
    }
}
