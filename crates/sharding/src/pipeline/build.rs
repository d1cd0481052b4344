//! Constructors of `PipelineTable`, from a schedule and from lists of actions.

use super::check::Checker;
use super::order::{TimedPass, passes};
use super::{Action, ActionKind, PipelineError, PipelineTable, Schedule};

impl PipelineTable {
    /// Creates the table of a schedule, for `ranks` ranks with `chunks` stages each, and `micro_batches` micro-batches
    /// per step.
    ///
    /// The parameters of a stage are gathered once, before its first pass. Its gradients are reduced and its parameters
    /// freed once, after its last pass. The traffic of sharding therefore does not grow with the number of
    /// micro-batches. A rank sends a result before it starts its next pass.
    ///
    /// ```
    /// use brigade_sharding::pipeline::{PipelineTable, Schedule};
    ///
    /// let table = PipelineTable::new(Schedule::ZeroBubbleV, 2, 4, 2)?;
    /// assert_eq!(table.stages_of(1).collect::<Vec<_>>(), [1, 2]);
    ///
    /// let error = PipelineTable::new(Schedule::Interleaved, 4, 9, 2).unwrap_err();
    /// assert!(error.to_string().ends_with("take 8 or 10"), "{error}");
    /// # Ok::<(), brigade_sharding::pipeline::PipelineError>(())
    /// ```
    ///
    /// # Errors
    /// [`PipelineError::Zero`] for a number of 0, [`PipelineError::TooLarge`] for more passes than a table can have,
    /// and [`PipelineError::Chunks`] or [`PipelineError::MicroBatches`] for numbers that the schedule cannot run.
    pub fn new(
        schedule: Schedule,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<Self, PipelineError> {
        schedule.check(ranks, micro_batches, chunks)?;
        let stage_ranks: Vec<_> =
            (0..ranks * chunks).map(|stage| schedule.rank_of(stage, ranks)).collect();
        let passes = passes(schedule, ranks, micro_batches, chunks);
        let actions = with_messages(&passes, ranks, micro_batches, &stage_ranks);
        let limit = |rank| schedule.held_limit(rank, ranks, micro_batches, chunks);
        Self::from_actions(stage_ranks, micro_batches, (0..ranks).map(limit).collect(), actions)
    }

    /// Creates a table from a list of actions for each rank, and checks it. `stage_ranks` has the rank of each stage.
    /// `held_limits` has the maximum number of stage activations that each rank may hold. An activation is held from
    /// the forward pass until the weight gradients of the same micro-batch are computed.
    ///
    /// ```
    /// use brigade_sharding::pipeline::{Action, ActionKind, PipelineTable};
    ///
    /// let step = |kind| Action::of_step(kind, 0);
    /// let mut actions = vec![
    ///     step(ActionKind::Unshard),
    ///     Action::new(ActionKind::Forward, 0, 0),
    ///     Action::new(ActionKind::Backward, 0, 0),
    ///     step(ActionKind::ReduceGradients),
    ///     step(ActionKind::Reshard),
    /// ];
    /// PipelineTable::from_actions(vec![0], 1, vec![1], vec![actions.clone()])?;
    ///
    /// actions.swap(1, 2);
    /// let error = PipelineTable::from_actions(vec![0], 1, vec![1], vec![actions]).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "rank 0, action 1 (backward of stage 0, micro-batch 0) must come after forward of stage 0, \
    ///      micro-batch 0, which is not before it in the list"
    /// );
    /// # Ok::<(), brigade_sharding::pipeline::PipelineError>(())
    /// ```
    ///
    /// # Errors
    /// Returns the first fault that is found, with its rank, position and action:
    ///
    /// - a number of 0, or lists whose lengths do not match;
    /// - an action of another rank's stage, a repeated action, or a missing one;
    /// - a pass before its input, a send before its pass, or gradients of weights before those of inputs;
    /// - a reduction or a free before the last pass of the stage;
    /// - more activations than the limit;
    /// - a send without its receive, or a receive without its send;
    /// - a rank that receives messages in an order that differs from that of the sends;
    /// - a deadlock: messages that wait for each other, if a send ends only when its receive has begun.
    pub fn from_actions(
        stage_ranks: Vec<usize>,
        micro_batches: usize,
        held_limits: Vec<usize>,
        actions: Vec<Vec<Action>>,
    ) -> Result<Self, PipelineError> {
        let mut table =
            Self { micro_batches, stage_ranks, held_limits, actions, order: Vec::new() };
        table.order = Checker::check(&table)?;
        Ok(table)
    }
}

/// Returns the list of actions of each rank, for passes with their times.
///
/// All ranks take their actions from one total order by time: a message is sent when its pass ends, before the passes
/// that begin at that time. Any such order is free of deadlocks, even if a send waits for its receive.
fn with_messages(
    passes: &[TimedPass],
    ranks: usize,
    micro_batches: usize,
    stage_ranks: &[usize],
) -> Vec<Vec<Action>> {
    let mut events = Vec::with_capacity(2 * passes.len());
    for &TimedPass { rank, pass, start, end } in passes {
        events.push((start, true, pass, rank));
        let message = match pass.kind {
            ActionKind::Forward => pass.as_kind(ActionKind::SendActivation),
            ActionKind::Backward | ActionKind::BackwardInput => {
                pass.as_kind(ActionKind::SendGradient)
            }
            _ => continue,
        };
        let to = message.counterpart().and_then(|it| stage_ranks.get(it.stage));
        if to.is_some_and(|to| *to != rank) {
            events.push((end, false, message, rank));
        }
    }
    events.sort_unstable();
    let mut actions = vec![Vec::new(); ranks];
    let mut left = vec![micro_batches; stage_ranks.len()];
    let mut is_whole = vec![false; stage_ranks.len()];
    for (_, is_pass, action, rank) in events {
        let stage = action.stage;
        if is_pass && !std::mem::replace(&mut is_whole[stage], true) {
            actions[rank].push(Action::of_step(ActionKind::Unshard, stage));
        }
        actions[rank].push(action);
        if let Some(receive) = action.counterpart() {
            actions[stage_ranks[receive.stage]].push(receive);
        }
        if matches!(action.kind, ActionKind::Backward | ActionKind::BackwardWeight) {
            left[stage] -= 1;
            if left[stage] == 0 {
                let end = [ActionKind::ReduceGradients, ActionKind::Reshard];
                actions[rank].extend(end.map(|kind| Action::of_step(kind, stage)));
            }
        }
    }
    actions
}
