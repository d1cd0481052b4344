//! Checks of a pipeline table: passes, messages, limits and deadlocks.

use std::collections::HashMap;

use super::table::Event;
use super::{Action, ActionFault, ActionKind, PipelineError, PipelineTable, Place};

/// A table that is being checked, with the place of each action that has been recorded.
pub(super) struct Checker<'a> {
    table: &'a PipelineTable,
    places: HashMap<Action, Event>,
}

impl<'a> Checker<'a> {
    /// Checks the table. Returns all actions in topological order, each receive directly after its send.
    pub(super) fn check(table: &'a PipelineTable) -> Result<Vec<Event>, PipelineError> {
        check_sizes(table)?;
        let mut checker = Self { table, places: HashMap::new() };
        for rank in 0..table.ranks() {
            checker.check_rank(rank)?;
        }
        for rank in 0..table.ranks() {
            for (position, action) in table.actions(rank).iter().enumerate() {
                checker.check_pair(Event { rank, position }, *action)?;
            }
        }
        checker.check_all_there()?;
        checker.check_ends()?;
        checker.check_orders()?;
        checker.order()
    }

    fn action(&self, event: Event) -> Action {
        self.table.actions[event.rank][event.position]
    }

    fn fault(&self, event: Event, fault: ActionFault) -> PipelineError {
        PipelineError::Action { place: self.place(event), fault }
    }

    fn place(&self, event: Event) -> Place {
        Place { rank: event.rank, position: event.position, action: self.action(event) }
    }

    /// Checks the list of one rank, and records the places of its actions.
    fn check_rank(&mut self, rank: usize) -> Result<(), PipelineError> {
        let table = self.table;
        let (limit, mut held) = (table.held_limits[rank], 0);
        for (position, &action) in table.actions[rank].iter().enumerate() {
            let event = Event { rank, position };
            self.check_fields(event, action)?;
            if let Some(other) = self.same_work(action) {
                let fault =
                    ActionFault::Repeated { position: other.position, action: self.action(other) };
                return Err(self.fault(event, fault));
            }
            if let Some(needs) = self.needs(action) {
                return Err(self.fault(event, ActionFault::Early { needs }));
            }
            match action.kind {
                ActionKind::Forward => held += 1,
                ActionKind::Backward | ActionKind::BackwardWeight => held -= 1,
                _ => {}
            }
            if held > limit {
                return Err(self.fault(event, ActionFault::Held { held, limit }));
            }
            self.places.insert(action, event);
        }
        Ok(())
    }

    fn check_fields(&self, event: Event, action: Action) -> Result<(), PipelineError> {
        let table = self.table;
        let Some(&owner) = table.stage_ranks.get(action.stage) else {
            return Err(self.fault(event, ActionFault::NoSuchStage { stages: table.stages() }));
        };
        let is_right = match action.micro_batch {
            Some(micro_batch) => action.kind.has_micro_batch() && micro_batch < table.micro_batches,
            None => !action.kind.has_micro_batch(),
        };
        if !is_right {
            let micro_batches = table.micro_batches;
            return Err(self.fault(event, ActionFault::MicroBatch { micro_batches }));
        }
        if owner != event.rank {
            return Err(self.fault(event, ActionFault::WrongRank { owner }));
        }
        let is_message = !action.kind.computes() && action.kind.has_micro_batch();
        if is_message && table.peer(action).is_none_or(|peer| peer == event.rank) {
            return Err(self.fault(event, ActionFault::NoPeer));
        }
        Ok(())
    }

    /// Finds an action recorded before that does the same work, or a part of it.
    fn same_work(&self, action: Action) -> Option<Event> {
        let parts: &[ActionKind] = match action.kind {
            ActionKind::Backward => {
                &[ActionKind::Backward, ActionKind::BackwardInput, ActionKind::BackwardWeight]
            }
            ActionKind::BackwardInput => &[ActionKind::BackwardInput, ActionKind::Backward],
            ActionKind::BackwardWeight => &[ActionKind::BackwardWeight, ActionKind::Backward],
            _ => return self.places.get(&action).copied(),
        };
        parts.iter().find_map(|kind| self.places.get(&action.as_kind(*kind)).copied())
    }

    /// Returns a dependency of an action that has not been recorded. All dependencies are on the same rank: results of
    /// other ranks arrive in messages.
    fn needs(&self, action: Action) -> Option<Action> {
        let Action { kind, stage, .. } = action;
        let rank = self.table.stage_ranks[stage];
        // A neighbouring stage on this rank gives its result without a message.
        let is_here = |stage: usize| self.table.stage_ranks.get(stage) == Some(&rank);
        let missing = |action: Action| (!self.places.contains_key(&action)).then_some(action);
        let missing_gradient = |stage: usize| {
            let backward = Action { kind: ActionKind::Backward, stage, ..action };
            let input = backward.as_kind(ActionKind::BackwardInput);
            missing(backward).and_then(|backward| missing(input).map(|_| backward))
        };
        match kind {
            ActionKind::Forward => {
                missing(Action::of_step(ActionKind::Unshard, stage)).or_else(|| {
                    match stage.checked_sub(1) {
                        None => None,
                        Some(before) if is_here(before) => {
                            missing(Action { stage: before, ..action })
                        }
                        Some(_) => missing(action.as_kind(ActionKind::ReceiveActivation)),
                    }
                })
            }
            ActionKind::Backward | ActionKind::BackwardInput => {
                missing(action.as_kind(ActionKind::Forward)).or_else(|| {
                    if stage + 1 == self.table.stages() {
                        None
                    } else if is_here(stage + 1) {
                        missing_gradient(stage + 1)
                    } else {
                        missing(action.as_kind(ActionKind::ReceiveGradient))
                    }
                })
            }
            ActionKind::BackwardWeight => missing(action.as_kind(ActionKind::BackwardInput)),
            ActionKind::SendActivation => missing(action.as_kind(ActionKind::Forward)),
            ActionKind::SendGradient => missing_gradient(stage),
            _ => None,
        }
    }

    fn check_pair(&self, event: Event, action: Action) -> Result<(), PipelineError> {
        let (Some(counterpart), Some(peer)) = (action.counterpart(), self.table.peer(action))
        else {
            return Ok(());
        };
        if self.places.contains_key(&counterpart) {
            return Ok(());
        }
        Err(self.fault(event, ActionFault::Unmatched { peer, counterpart }))
    }

    /// Checks that no pass, reduction or free is missing. Messages are not checked here: a pass without its receive,
    /// and a message with one half, have been refused before.
    fn check_all_there(&self) -> Result<(), PipelineError> {
        let check = |action: Action| {
            if self.same_work(action).is_some() {
                return Ok(());
            }
            Err(PipelineError::Missing { rank: self.table.stage_ranks[action.stage], action })
        };
        for stage in 0..self.table.stages() {
            for micro_batch in 0..self.table.micro_batches {
                for kind in
                    [ActionKind::Forward, ActionKind::BackwardInput, ActionKind::BackwardWeight]
                {
                    check(Action::new(kind, stage, micro_batch))?;
                }
            }
            for kind in STEP_ENDS {
                check(Action::of_step(kind, stage))?;
            }
        }
        Ok(())
    }

    /// Checks that a stage is reduced and freed after its last pass.
    fn check_ends(&self) -> Result<(), PipelineError> {
        for (rank, actions) in self.table.actions.iter().enumerate() {
            let mut ended: HashMap<usize, Event> = HashMap::new();
            for (position, action) in actions.iter().enumerate() {
                if STEP_ENDS.contains(&action.kind) {
                    ended.entry(action.stage).or_insert(Event { rank, position });
                } else if action.kind.computes()
                    && let Some(end) = ended.get(&action.stage)
                {
                    return Err(self.fault(*end, ActionFault::Early { needs: *action }));
                }
            }
        }
        Ok(())
    }

    /// Checks that each rank receives the messages of another rank in the order in which they are sent.
    fn check_orders(&self) -> Result<(), PipelineError> {
        let mut sent: HashMap<(usize, usize), Vec<Action>> = HashMap::new();
        for (rank, actions) in self.table.actions.iter().enumerate() {
            for &action in actions.iter().filter(|it| is_send(it.kind)) {
                if let Some(peer) = self.table.peer(action) {
                    sent.entry((rank, peer)).or_default().push(action);
                }
            }
        }
        let mut sent: HashMap<_, _> =
            sent.into_iter().map(|(pair, sends)| (pair, sends.into_iter())).collect();
        for (rank, actions) in self.table.actions.iter().enumerate() {
            for (position, action) in
                actions.iter().enumerate().filter(|(_, it)| is_receive(it.kind))
            {
                let Some(peer) = self.table.peer(*action) else { continue };
                let next = sent.get_mut(&(peer, rank)).and_then(Iterator::next);
                if let Some(sent) = next
                    && Some(sent) != action.counterpart()
                {
                    let fault = ActionFault::Reordered { peer, sent };
                    return Err(self.fault(Event { rank, position }, fault));
                }
            }
        }
        Ok(())
    }

    /// Sorts all actions topologically. A send and its receive are one node, which is ready when both lists have
    /// reached it.
    fn order(&self) -> Result<Vec<Event>, PipelineError> {
        let ranks = self.table.ranks();
        let all = self.table.actions.iter().map(Vec::len).sum();
        let mut order = Vec::with_capacity(all);
        let mut heads = vec![0; ranks];
        let mut ready: Vec<_> = (0..ranks).rev().collect();
        while let Some(rank) = ready.pop() {
            while let Some(&action) = self.table.actions[rank].get(heads[rank]) {
                let here = Event { rank, position: heads[rank] };
                if let Some(there) = action.counterpart().and_then(|it| self.places.get(&it)) {
                    if heads[there.rank] != there.position {
                        break;
                    }
                    heads[there.rank] += 1;
                    ready.push(there.rank);
                    let is_sent = is_send(action.kind);
                    order.extend(if is_sent { [here, *there] } else { [*there, here] });
                } else {
                    order.push(here);
                }
                heads[rank] += 1;
            }
        }
        if order.len() == all { Ok(order) } else { Err(self.circle(&heads)) }
    }

    /// Returns the error of a deadlock, with the ranks that wait for each other in a cycle.
    fn circle(&self, heads: &[usize]) -> PipelineError {
        let is_left = |rank: &usize| heads[*rank] < self.table.actions[*rank].len();
        let mut next = (0..heads.len()).find(is_left);
        let mut waits: Vec<Place> = Vec::new();
        while let Some(rank) = next {
            if let Some(first) = waits.iter().position(|place| place.rank == rank) {
                waits.drain(..first);
                break;
            }
            let place = self.place(Event { rank, position: heads[rank] });
            waits.push(place);
            next = self.table.peer(place.action);
        }
        PipelineError::Deadlock { waits }
    }
}

const STEP_ENDS: [ActionKind; 2] = [ActionKind::ReduceGradients, ActionKind::Reshard];

fn is_send(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::SendActivation | ActionKind::SendGradient)
}

fn is_receive(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::ReceiveActivation | ActionKind::ReceiveGradient)
}

fn check_sizes(table: &PipelineTable) -> Result<(), PipelineError> {
    let (ranks, limits) = (table.ranks(), table.held_limits.len());
    for (number, of) in
        [(ranks, "ranks"), (table.stages(), "stages"), (table.micro_batches, "micro-batches")]
    {
        if number == 0 {
            return Err(PipelineError::Zero { of });
        }
    }
    if limits != ranks {
        return Err(PipelineError::Limits { ranks, limits });
    }
    let mut has_stage = vec![false; ranks];
    for (stage, &rank) in table.stage_ranks.iter().enumerate() {
        *has_stage.get_mut(rank).ok_or(PipelineError::StageRank { stage, rank, ranks })? = true;
    }
    match has_stage.iter().position(|it| !it) {
        Some(rank) => Err(PipelineError::IdleRank { rank }),
        None => Ok(()),
    }
}
