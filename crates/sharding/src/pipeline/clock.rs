//! A table on a simulated clock.

use std::collections::HashMap;

use super::{Action, ActionKind, PipelineError, PipelineTable};

/// How long passes and messages take, in any unit of time.
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
    /// Times of each stage's passes.
    pub stages: Vec<StageCosts>,
    /// Time from the end of a pass until another rank has its result. Sender and receiver compute meanwhile.
    pub message: f64,
}

/// How long the passes of a stage take with one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageCosts {
    /// Time of the forward pass.
    pub forward: f64,
    /// Time of the gradients of the inputs.
    pub backward_input: f64,
    /// Time of the gradients of the weights. [`ActionKind::Backward`] takes the sum of both.
    pub backward_weight: f64,
}

/// When everything in a table runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// Time until the last rank has ended.
    pub total: f64,
    /// What each rank does.
    pub ranks: Vec<RankTimeline>,
}

/// When the actions of a rank run.
#[derive(Debug, Clone, PartialEq)]
pub struct RankTimeline {
    /// Its actions, in their order. Of a message it has the time until it has arrived.
    pub spans: Vec<Span>,
    /// Time for which the rank computes.
    pub busy: f64,
    /// Time for which it does not.
    pub idle: f64,
}

/// An action with its times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

impl Costs {
    /// Returns costs of 1 for each kind of pass, and none for messages.
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
    /// Returns the time that ranks do not compute, as a part of the time that they do.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let sum = |time: fn(&RankTimeline) -> f64| self.ranks.iter().map(time).sum();
        part(sum(|rank| rank.idle), sum(|rank| rank.busy))
    }
}

impl RankTimeline {
    /// Returns the time that the rank does not compute, as a part of the time that it does.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        part(self.idle, self.busy)
    }
}

fn part(idle: f64, busy: f64) -> f64 {
    if busy > 0.0 { idle / busy } else { 0.0 }
}

impl PipelineTable {
    /// Runs the table on a simulated clock. Sends and receives are in the background, as an executor with
    /// asynchronous messages has them: a pass waits for what it receives, and a send for nothing. Gathers and
    /// reductions of sharded parameters take no time.
    ///
    /// # Errors
    /// Costs for another number of stages; a cost that is negative or not finite.
    pub fn simulate(&self, costs: &Costs) -> Result<Timeline, PipelineError> {
        costs.check(self.stages())?;
        Ok(self.run(costs))
    }

    pub(super) fn run(&self, costs: &Costs) -> Timeline {
        let idle = RankTimeline { spans: Vec::new(), busy: 0.0, idle: 0.0 };
        let mut ranks = vec![idle; self.ranks()];
        // When a rank has ended its last pass, and when what it has received for the next one is there.
        let mut free = vec![0.0f64; self.ranks()];
        let mut arrived = vec![HashMap::new(); self.ranks()];
        let mut sent = 0.0f64;
        for event in &self.order {
            let rank = event.rank;
            let action = self.actions[rank][event.position];
            let (start, end) = match action.kind {
                ActionKind::SendActivation | ActionKind::SendGradient => {
                    // A gradient may be sent after a later pass; it leaves when it is sent.
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
