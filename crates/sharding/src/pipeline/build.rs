//! How tables are made, of schedules and of lists.

use super::check::Checker;
use super::order::{TimedPass, passes};
use super::{Action, ActionKind, PipelineError, PipelineTable, Schedule};

impl PipelineTable {
    /// Returns the table of a schedule: `ranks` with `chunks` stages each and `micro_batches` in a step.
    ///
    /// Each stage is gathered once, before its first pass, and freed once, after its last; its gradients are
    /// reduced after its last gradient of weights. So sharding sends no more with many micro-batches than with one.
    /// A rank sends what it has computed before its next pass.
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
    /// A number of 0; more passes than a table can have; a number of chunks or of micro-batches that the schedule
    /// does not have, with the nearest that it has.
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

    /// Returns the table with these lists of actions, one for each rank. `stage_ranks` has the rank of each stage,
    /// `held_limits` the most activations that each rank may hold: those of stages whose forward pass has run and
    /// whose weights have no gradient of it yet.
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
    /// The first fault, with its rank, position, action, stage and micro-batch: an action of a stage of another
    /// rank; one that is there twice or is missing; a pass before its input, a send before its pass, a gradient of
    /// weights before that of inputs; a reduction or a free before the last pass of the stage; more activations than
    /// the limit; a send without its receive, or the other way round; two ranks that do not have their messages in
    /// the same order, in one direction; messages that wait for each other in a circle, where a send ends when its
    /// receive has begun.
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

/// The lists of actions for passes with their times.
///
/// All ranks take their actions from one order of everything that happens: a message is when its pass ends, and before
/// the passes that begin then. Any such order is free of circles, also where a send waits for its receive.
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
