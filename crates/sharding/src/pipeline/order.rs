//! The order of each rank's passes, and their times if all kinds of passes take one time slot.

use std::collections::HashMap;

use super::{Action, ActionKind, Schedule};

/// A pass with the time slots in which it runs. [`ActionKind::Backward`] takes two slots, other passes take one.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimedPass {
    pub(super) rank: usize,
    pub(super) pass: Action,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Returns the passes of all ranks, each rank's in its order.
pub(super) fn passes(
    schedule: Schedule,
    ranks: usize,
    micro_batches: usize,
    chunks: usize,
) -> Vec<TimedPass> {
    let order = |rank| match schedule {
        Schedule::GPipe | Schedule::LoopedBfs => breadth_first(rank, ranks, micro_batches, chunks),
        Schedule::OneForwardOneBackward => alternating(rank, ranks - 1 - rank, micro_batches),
        Schedule::Interleaved => {
            let warm_up = Schedule::interleaved_warm_up(rank, ranks, micro_batches, chunks);
            interleaved(rank, ranks, warm_up, micro_batches, chunks)
        }
        Schedule::ZeroBubble => weights_apart(rank, ranks, micro_batches),
        Schedule::ZeroBubbleV => in_a_v(rank, ranks, micro_batches),
    };
    let orders: Vec<_> = (0..ranks).map(order).collect();
    SlotClock::new(ranks, micro_batches, chunks).run(&orders)
}

fn breadth_first(rank: usize, ranks: usize, micro_batches: usize, chunks: usize) -> Vec<Action> {
    let pass =
        |kind, chunk: usize, micro_batch| Action::new(kind, chunk * ranks + rank, micro_batch);
    let of_all = |kind, chunk| (0..micro_batches).map(move |it| pass(kind, chunk, it));
    let forward = (0..chunks).flat_map(|chunk| of_all(ActionKind::Forward, chunk));
    let backward = (0..chunks).rev().flat_map(|chunk| of_all(ActionKind::Backward, chunk));
    forward.chain(backward).collect()
}

/// Returns the 1F1B order of the passes of one stage.
fn alternating(stage: usize, warm_up: usize, micro_batches: usize) -> Vec<Action> {
    let forward = |it| Action::new(ActionKind::Forward, stage, it);
    let backward = |it| Action::new(ActionKind::Backward, stage, it);
    one_forward_one_backward(
        warm_up,
        (0..micro_batches).map(forward),
        (0..micro_batches).map(backward),
    )
}

fn interleaved(
    rank: usize,
    ranks: usize,
    warm_up: usize,
    micro_batches: usize,
    chunks: usize,
) -> Vec<Action> {
    let round = Schedule::round(ranks, micro_batches);
    let pass = |kind, at: usize| {
        let chunk = at / round % chunks;
        let chunk = if kind == ActionKind::Forward { chunk } else { chunks - 1 - chunk };
        let micro_batch = at / (round * chunks) * round + at % round;
        Action::new(kind, chunk * ranks + rank, micro_batch)
    };
    let all = micro_batches * chunks;
    let forward = (0..all).map(|at| pass(ActionKind::Forward, at));
    let backward = (0..all).map(|at| pass(ActionKind::Backward, at));
    one_forward_one_backward(warm_up, forward, backward)
}

fn one_forward_one_backward(
    warm_up: usize,
    mut forward: impl Iterator<Item = Action>,
    backward: impl Iterator<Item = Action>,
) -> Vec<Action> {
    let mut order: Vec<_> = forward.by_ref().take(warm_up).collect();
    for backward in backward {
        order.extend(forward.next());
        order.push(backward);
    }
    order
}

/// Returns the ZB-H1 order: rank `r` computes the gradients of weights `r` micro-batches after those of the inputs, so
/// that all ranks hold as many activations as the first, and the last ranks still have work where 1F1B is idle.
fn weights_apart(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let weight = |it| Action::new(ActionKind::BackwardWeight, rank, it);
    let mut order = Vec::with_capacity(3 * micro_batches);
    for pass in alternating(rank, ranks - 1 - rank, micro_batches) {
        if pass.kind == ActionKind::Forward {
            order.push(pass);
            continue;
        }
        order.push(pass.as_kind(ActionKind::BackwardInput));
        order.extend(pass.micro_batch.and_then(|it| it.checked_sub(rank)).map(weight));
    }
    order.extend((micro_batches.saturating_sub(rank)..micro_batches).map(weight));
    order
}

/// Returns the ZB-V order, for at least twice as many micro-batches as ranks. Until the first gradient comes back
/// through both stages, the rank fills the time with forward passes of its first stage and whole rounds of its second
/// one; then each round has all six passes. At the end it delays gradients of weights while the ranks before it wait
/// for gradients.
fn in_a_v(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    const FIRST: usize = 0;
    const SECOND: usize = 1;
    use ActionKind::{BackwardInput, BackwardWeight, Forward};

    let stages = [rank, 2 * ranks - 1 - rank];
    let mut done: HashMap<(ActionKind, usize), usize> = HashMap::new();
    let mut order = Vec::with_capacity(6 * micro_batches);
    let mut run = |times: usize, passes: &[(ActionKind, usize)]| {
        for _ in 0..times {
            for &(kind, half) in passes {
                let next = done.entry((kind, half)).or_default();
                order.push(Action::new(kind, stages[half], *next));
                *next += 1;
            }
        }
    };
    let of_second = [(Forward, SECOND), (BackwardInput, SECOND), (BackwardWeight, SECOND)];
    let of_first = [(Forward, FIRST), (BackwardInput, FIRST), (BackwardWeight, FIRST)];
    let after = ranks - rank;
    run(2 * after - 1, &[(Forward, FIRST)]);
    run(rank, &[(Forward, SECOND), (Forward, FIRST)]);
    run(after, &of_second);
    // So far the first stage has run 2 after - 1 + rank = 2 ranks - 1 - rank times, and the second one `ranks` times.
    let rounds = micro_batches - ranks;
    let forward = micro_batches - (2 * ranks - 1 - rank);
    run(forward, &[of_first, of_second].concat());
    run(rounds - forward, &[&of_first[1..], &of_second].concat());
    run(rank, &[(BackwardInput, FIRST), (BackwardInput, SECOND)]);
    run(after, &of_first[1..]);
    run(rank, &[(BackwardWeight, SECOND)]);
    run(rank, &[(BackwardWeight, FIRST)]);
    order
}

/// A clock in time slots, which records the end of each pass and starts a pass when its inputs are ready.
struct SlotClock {
    ranks: usize,
    micro_batches: usize,
    stages: usize,
    /// End of each forward pass, by stage and micro-batch.
    forward: Vec<Option<usize>>,
    /// End of the input gradients of each pass, by stage and micro-batch.
    backward: Vec<Option<usize>>,
    passes: Vec<TimedPass>,
}

impl SlotClock {
    fn new(ranks: usize, micro_batches: usize, chunks: usize) -> Self {
        let stages = ranks * chunks;
        let none = vec![None; stages * micro_batches];
        let (forward, backward) = (none.clone(), none);
        Self { ranks, micro_batches, stages, forward, backward, passes: Vec::new() }
    }

    /// Runs the orders of all ranks. In a deadlock the remaining passes are left out, which the check of the table
    /// reports.
    fn run(mut self, orders: &[Vec<Action>]) -> Vec<TimedPass> {
        let mut next = vec![0; self.ranks];
        let mut free = vec![0; self.ranks];
        let mut has_run = true;
        while has_run {
            has_run = false;
            for rank in 0..self.ranks {
                while let Some(&pass) = orders[rank].get(next[rank])
                    && let Some(ready) = self.ready(pass)
                {
                    free[rank] = self.record(rank, pass, free[rank].max(ready));
                    next[rank] += 1;
                    has_run = true;
                }
            }
        }
        self.passes
    }

    /// Returns the time at which the inputs of a pass are ready, or `None` if they have not been computed.
    fn ready(&self, pass: Action) -> Option<usize> {
        let at = self.index(pass);
        match pass.kind {
            ActionKind::Forward if pass.stage == 0 => Some(0),
            ActionKind::Forward => self.forward[at - self.micro_batches],
            ActionKind::BackwardWeight => self.backward[at],
            _ if pass.stage + 1 == self.stages => self.forward[at],
            _ => self.backward[at + self.micro_batches],
        }
    }

    fn record(&mut self, rank: usize, pass: Action, start: usize) -> usize {
        let end = start + if pass.kind == ActionKind::Backward { 2 } else { 1 };
        let at = self.index(pass);
        match pass.kind {
            ActionKind::Forward => self.forward[at] = Some(end),
            ActionKind::BackwardWeight => {}
            _ => self.backward[at] = Some(end),
        }
        self.passes.push(TimedPass { rank, pass, start, end });
        end
    }

    fn index(&self, pass: Action) -> usize {
        pass.stage * self.micro_batches + pass.micro_batch.unwrap_or(0)
    }
}
