//! Formation of a job: decides which hosts take part, with which ranks, and when an attempt starts, stops and counts,
//! without clock and network.

mod admission;
mod event;
mod failures;
mod gathering;
mod job_event;
mod member;
mod membership;
mod record;
mod rules;
mod stopping;

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use crate::{FromAgent, JobResult, ToAgent};

pub use event::{Action, AgentId, Event};
pub use job_event::{CauseKind, HostPart, JobCause, JobEvent, Record};
pub use rules::Rules;

use admission::Admission;
use failures::{Failures, LastSeen};
use gathering::Gathering;
use member::{Activity, Member};

/// State machine of the coordinator: events go in, actions come out.
///
/// Pass each event with its time to [`Formation::handle`], perform the returned actions, and pass [`Event::Tick`] when
/// [`Formation::deadline`] is reached. The time may come from any clock, from any start.
///
/// ```
/// use std::time::Duration;
/// use brigade_rendezvous::{Action, AgentId, Event, Formation, Join, Rules, ToAgent};
///
/// let mut formation = Formation::new(Rules { run_id: "night".into(), ..Rules::default() });
/// let join = Join {
///     run_id: "night".into(), nproc: 4, port: 29_500, ..Join::new("node1")
/// };
/// let joined = Event::Joined { agent: AgentId(1), join, seen: None, remote: false };
/// let actions = formation.handle(Duration::ZERO, joined);
/// let Some(Action::Send(AgentId(1), ToAgent::Start(part))) = actions.last() else { panic!() };
/// assert_eq!((part.world_size, part.num_nodes), (4, 1));
/// ```
#[derive(Debug)]
pub struct Formation {
    rules: Rules,
    now: Duration,
    members: BTreeMap<AgentId, Member>,
    /// Connections that are being made, with the names of their hosts.
    expected: BTreeMap<AgentId, String>,
    /// Number of agents that have been expected or have joined, in all.
    announced: usize,
    /// Number of agents that have joined.
    joins: u64,
    /// Number of members that wait for a node rank that another one has.
    duplicates: usize,
    state: State,
    /// Number of the last attempt that was started.
    attempt: Option<u32>,
    next_attempt: u32,
    restarts: u32,
    failures: Failures,
    admission: Admission,
    /// Last order to stop the current attempt, for agents that may not have received it.
    last_stop: Option<(i32, String)>,
    /// `true` if a host has ranks that SIGKILL does not end.
    stuck: bool,
    /// Time before which no member can have exceeded its time limit.
    next_look: Duration,
    actions: Vec<Action>,
}

#[derive(Debug)]
enum State {
    Gathering(Gathering),
    Running,
    /// The attempt is being stopped, until the agents have stopped or this time limit passes.
    Stopping(Duration),
    Over(JobResult),
}

impl Formation {
    /// Creates the state of a job without members.
    #[must_use]
    pub fn new(mut rules: Rules) -> Self {
        rules.min_nodes = rules.min_nodes.max(1);
        rules.max_nodes = rules.max_nodes.max(rules.min_nodes);
        Self {
            rules,
            now: Duration::ZERO,
            members: BTreeMap::new(),
            expected: BTreeMap::new(),
            announced: 0,
            joins: 0,
            duplicates: 0,
            state: State::Gathering(Gathering::first(Duration::ZERO)),
            attempt: None,
            next_attempt: 0,
            restarts: 0,
            failures: Failures::default(),
            admission: Admission::default(),
            last_stop: None,
            stuck: false,
            next_look: Duration::MAX,
            actions: Vec::new(),
        }
    }

    /// Handles an event at `now` and returns the actions that follow, in order.
    #[must_use]
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        if let Event::Alive { agent } | Event::Message { agent, .. } = &event {
            self.note_sign_of_life(*agent);
        }
        let idle = matches!(
            event,
            Event::Alive { .. } | Event::Message { message: FromAgent::Beat { .. }, .. }
        );
        match event {
            Event::Expected { agent, .. } if self.job_result().is_some() => {
                self.actions.push(Action::Close(agent));
            }
            Event::Expected { agent, host } => {
                self.announced += 1;
                self.expected.insert(agent, host);
            }
            Event::Joined { agent, join, seen, remote } => self.joined(agent, join, seen, remote),
            Event::Message { agent, message } => self.handle_message(agent, message),
            Event::Closed { agent, how } => self.closed(agent, how),
            Event::Disconnected { agent, how, reset } => self.disconnected(agent, how, reset),
            Event::Interrupt { signal } => self.interrupt(failures::checked(signal), None),
            Event::Alive { .. } | Event::Tick => {}
        }
        self.check_heartbeats();
        let due = self.deadline().is_some_and(|deadline| deadline <= self.now);
        // A thousand agents send a thousand heartbeats per second, for which the following is skipped.
        if !idle || due || !self.actions.is_empty() {
            self.check_stop_deadline();
            self.advance();
            self.plan_admission();
        }
        mem::take(&mut self.actions)
    }

    /// Returns the time at which to call again with [`Event::Tick`], if nothing else happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let own = match &self.state {
            State::Gathering(gathering) => {
                let deadline = gathering.deadline(&self.rules);
                Some(deadline).filter(|_| !self.waits_for_absent())
            }
            State::Running => self.admission.due,
            State::Over(_) => None,
            State::Stopping(until) => {
                Some(*until).filter(|_| self.members.values().any(|it| self.may_be_stuck(it)))
            }
        };
        let look = (self.next_look < Duration::MAX).then_some(self.next_look);
        own.into_iter().chain(look).min()
    }

    /// Returns the result of the job, once it has ended.
    #[must_use]
    pub fn job_result(&self) -> Option<&JobResult> {
        match &self.state {
            State::Over(job_result) => Some(job_result),
            _ => None,
        }
    }

    /// Returns `true` if the job is over and some agents have no connection over which they could be informed. The
    /// coordinator waits for them as long as they would wait for the coordinator.
    #[must_use]
    pub fn has_uninformed_members(&self) -> bool {
        self.job_result().is_some()
            && self.members.values().any(|member| member.disconnection.is_some())
    }

    fn handle_message(&mut self, agent: AgentId, message: FromAgent) {
        if matches!(self.state, State::Over(_)) {
            return;
        }
        let Some(member) = self.members.get_mut(&agent) else { return };
        let attempt = self.attempt;
        match message {
            FromAgent::Beat { sent } => {
                member.clock.compare(self.now, sent);
                self.failures.set_clock(agent, member.clock);
            }
            FromAgent::Failed(failure)
                if Some(failure.attempt) == attempt && member.takes_part() =>
            {
                self.failed(agent, failure);
            }
            FromAgent::Finished { attempt: of } if Some(of) == attempt => {
                match &mut member.activity {
                    part @ Activity::Running => *part = Activity::Finished,
                    Activity::Stopping { finished } => *finished = true,
                    Activity::Idle | Activity::Finished => {}
                }
            }
            FromAgent::Stopped { attempt: of, port, killed, stuck } if Some(of) == attempt => {
                self.stopped(agent, port, killed, stuck);
            }
            FromAgent::Interrupted { signal, count } => {
                // A lower count is that of an earlier message, which was sent again after a reconnection.
                if count > member.requests {
                    member.requests = count;
                    self.interrupt(failures::checked(signal), Some(agent));
                }
            }
            FromAgent::Leaving => self.leaves(agent),
            FromAgent::Unable { reason } => {
                self.lose(agent, reason, LastSeen::Unresponsive(self.now));
            }
            FromAgent::Join(_) => {
                self.lose(agent, "it joined twice".into(), LastSeen::Unresponsive(self.now));
            }
            FromAgent::Started { attempt: of, pids, at } if Some(of) == attempt => {
                self.ranks_started(agent, pids, at);
            }
            FromAgent::Exited { attempt: of, local_rank, exit_status, at }
                if Some(of) == attempt =>
            {
                self.rank_exited(agent, local_rank, exit_status, at);
            }
            // A message of an earlier attempt, or one that needs no decision.
            FromAgent::Failed(_)
            | FromAgent::Started { .. }
            | FromAgent::Exited { .. }
            | FromAgent::Finished { .. }
            | FromAgent::Stopped { .. }
            | FromAgent::Output { .. }
            | FromAgent::Progress { .. }
            | FromAgent::Say { .. } => {}
        }
    }

    /// Performs all transitions that need not wait for an event.
    fn advance(&mut self) {
        loop {
            let before = mem::discriminant(&self.state);
            match self.state {
                State::Gathering(_) => self.gather(),
                State::Running
                    if self.count(|member| member.activity == Activity::Running) == 0 =>
                {
                    self.end(JobResult { code: 0, cause: None });
                }
                State::Stopping(_)
                    if self
                        .count(|member| matches!(member.activity, Activity::Stopping { .. }))
                        == 0 =>
                {
                    self.settle();
                }
                State::Running => self.admit_waiting(),
                State::Stopping(_) | State::Over(_) => {}
            }
            if mem::discriminant(&self.state) == before {
                return;
            }
        }
    }

    fn count(&self, counts: impl Fn(&Member) -> bool) -> usize {
        self.members.values().filter(|member| counts(member)).count()
    }

    fn send(&mut self, agent: AgentId, message: ToAgent) {
        self.actions.push(Action::Send(agent, message));
    }

    fn say(&mut self, line: String) {
        self.actions.push(Action::Say(line));
    }
}

#[cfg(test)]
mod tests;
