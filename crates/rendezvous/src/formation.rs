//! Which hosts take part in a job, with which ranks, and when an attempt starts, stops and counts: the
//! decision alone, without clock and network.

mod admission;
mod event;
mod failures;
mod joining;
mod member;
mod on_message;
mod record;
mod rules;
mod start_attempt;
mod stopping;

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use crate::{FromAgent, ToAgent, Verdict};

pub use event::{Action, AgentId, Event};
pub use record::{CauseKind, HostPart, JobCause, JobEvent, Record};
pub use rules::Rules;

use admission::Admission;
use failures::Trouble;
use member::Member;
use start_attempt::Gathering;

/// The coordinator's decision.
///
/// Tell it what happens and when, do what it says, and call it again with [`Event::Tick`] when
/// [`Formation::deadline`] has come. Time is whatever clock the caller has, from any start.
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
    /// Connections that are being made.
    expected: BTreeMap<AgentId, String>,
    /// How many agents have been expected or have come, in all.
    announced: usize,
    /// How many have come.
    joins: u64,
    /// How many members wait for a node rank that another one has.
    duplicates: usize,
    state: State,
    /// The last attempt that has been started.
    attempt: Option<u32>,
    next_attempt: u32,
    restarts: u32,
    trouble: Trouble,
    admission: Admission,
    /// The last order to stop the present attempt, for agents that may not have received it.
    last_stop: Option<(i32, String)>,
    /// Some host has ranks that SIGKILL does not end.
    stuck: bool,
    /// No member can have been silent for too long before this.
    next_look: Duration,
    actions: Vec<Action>,
}

#[derive(Debug)]
enum State {
    Gathering(Gathering),
    Running,
    /// Until the agents have stopped, or this moment.
    Stopping(Duration),
    Over(Verdict),
}

impl Formation {
    /// A job without members.
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
            trouble: Trouble::default(),
            admission: Admission::default(),
            last_stop: None,
            stuck: false,
            next_look: Duration::MAX,
            actions: Vec::new(),
        }
    }

    /// Takes in what happened at `now`, and says what is to be done, in order.
    #[must_use]
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        if let Event::Heard { agent } | Event::Said { agent, .. } = &event {
            self.heard(*agent);
        }
        let idle = matches!(
            event,
            Event::Heard { .. } | Event::Said { message: FromAgent::Beat { .. }, .. }
        );
        match event {
            Event::Expected { agent, .. } if self.verdict().is_some() => {
                self.actions.push(Action::Close(agent));
            }
            Event::Expected { agent, host } => {
                self.announced += 1;
                self.expected.insert(agent, host);
            }
            Event::Joined { agent, join, seen, remote } => self.joined(agent, join, seen, remote),
            Event::Said { agent, message } => self.said(agent, message),
            Event::Closed { agent, how } => self.closed(agent, how),
            Event::Disconnected { agent, how, reset } => self.disconnected(agent, how, reset),
            Event::Interrupt { signal } => self.interrupt(failures::checked(signal), None),
            Event::Heard { .. } | Event::Tick => {}
        }
        self.look_for_silent();
        let due = self.deadline().is_some_and(|deadline| deadline <= self.now);
        // A thousand agents beat a thousand times a second: what follows is not done for a beat.
        if !idle || due || !self.actions.is_empty() {
            self.look_for_stuck();
            self.advance();
            self.plan_admission();
        }
        mem::take(&mut self.actions)
    }

    /// When to call again with [`Event::Tick`], if nothing else happens before.
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

    /// How the job ended, once it has.
    #[must_use]
    pub fn verdict(&self) -> Option<&Verdict> {
        match &self.state {
            State::Over(verdict) => Some(verdict),
            _ => None,
        }
    }

    /// The job is over, and some agents have no connection over which they could be told. They are
    /// waited for as long as they would wait for the coordinator.
    #[must_use]
    pub fn has_untold(&self) -> bool {
        self.verdict().is_some() && self.members.values().any(|member| member.away.is_some())
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

fn hosts(count: usize) -> String {
    if count == 1 { "1 host".into() } else { format!("{count} hosts") }
}

#[cfg(test)]
mod tests;
