//! Decisions of an agent: when ranks start and stop, which messages the coordinator gets, and when this process may
//! end. Pure: without clock, operating system and network.
//!
//! Every transition is a method named by the event that causes it. What must always hold is a property test
//! (`tests/any_order.rs`): an agent ends, it never has two groups of ranks, and it reports an attempt as finished only
//! after the last byte of its output.

mod attempt;
mod connection;
mod ending;
mod event;
#[cfg(test)]
mod tests;

use std::mem;
use std::time::Duration;

use crate::{LaunchError, Outcome};
use brigade_rank_env::text::counted;
use brigade_rendezvous::{Assignment, FromAgent, RankFailure, TimeLimits, ToAgent};

pub(super) use event::{Action, Event, JoinRequest};

use attempt::{Ended, FailureDetails, Group};
use connection::Connection;
use ending::{Ending, Interruption, StopRequest};

/// Facts about the job and the host that the agent's decisions depend on.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// Name of this host.
    pub(super) host: String,
    /// Number of ranks of this host.
    pub(super) nproc: usize,
    /// Maximum number of restarts of the job.
    pub(super) max_restarts: u32,
    pub(super) limits: TimeLimits,
    /// Kind of the rendezvous.
    pub(super) kind: Kind,
    /// `true` if the job may continue without this host.
    pub(super) may_leave: bool,
    /// `true` if the coordinator's address is a loopback address, or the coordinator is elected.
    pub(super) near: bool,
    /// Address of the coordinator, for messages.
    pub(super) coordinator: String,
    /// `true` if the coordinator's host shows the output.
    pub(super) forwards_output: bool,
}

/// Kind of a job's rendezvous, as far as decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The job has one host, with the coordinator in this process.
    OneHost,
    /// A launcher holds a session to each host and reports to the user.
    Launcher,
    /// A launcher on each host, one of which is the coordinator.
    Peers,
    /// A launcher on each host; when the coordinator is lost, another one may become the coordinator.
    Elected,
}

/// State machine of an agent. Pass each event with its time to [`AgentState::handle`], perform the returned actions in
/// order, and pass [`Event::Tick`] when [`AgentState::deadline`] is reached.
#[derive(Debug)]
pub(super) struct AgentState {
    facts: Facts,
    now: Duration,
    connection: Connection,
    /// Attempt that begins when no process of the earlier one is left.
    next: Option<Assignment>,
    /// The attempt that has processes here, or is about to.
    group: Option<Group>,
    /// Last attempt of which no process is left on this host.
    ended: Option<Ended>,
    /// Number of orders to write all output that have not been answered.
    draining: usize,
    /// Attempt that the coordinator has ordered to stop, until it is informed that the attempt has stopped.
    attempt_to_stop: Option<u32>,
    /// Earliest failure of the present attempt, as reported to the coordinator.
    failure: Option<RankFailure>,
    /// Messages about the last attempt that were sent to the coordinator for its event log.
    recorded: Vec<FromAgent>,
    /// Ranks that SIGKILL did not end.
    stuck: Option<String>,
    /// Number of hosts in the last attempt.
    hosts: usize,
    restarts: Restarts,
    /// Request of the user that this host stops.
    interruption: Option<Interruption>,
    /// The last request to the coordinator to stop the job.
    stop_request: Option<StopRequest>,
    output_closed: bool,
    /// Last line for the user that contained a reason.
    reason: Option<String>,
    ending: Ending,
    /// `true` if a coordinator in this process has informed all other agents that the job is over.
    others_notified: bool,
    actions: Vec<Action>,
}

/// Number of restarts of the job.
#[derive(Clone, Copy, Debug)]
struct Restarts {
    /// Number of restarts before the last attempt.
    used: u32,
    /// Maximum number of restarts.
    allowed: u32,
}

impl Restarts {
    fn are_left(self) -> bool {
        self.used < self.allowed
    }
}

impl AgentState {
    /// Creates an agent without a connection. Returns it with its first actions.
    pub(super) fn new(facts: Facts) -> (Self, Vec<Action>) {
        let restarts = Restarts { used: 0, allowed: facts.max_restarts };
        let this = Self {
            facts,
            now: Duration::ZERO,
            connection: Connection::Searching,
            next: None,
            group: None,
            ended: None,
            draining: 0,
            attempt_to_stop: None,
            failure: None,
            recorded: Vec::new(),
            stuck: None,
            hosts: 1,
            restarts,
            interruption: None,
            stop_request: None,
            output_closed: false,
            reason: None,
            ending: Ending::No,
            others_notified: false,
            actions: Vec::new(),
        };
        (this, vec![Action::MakeFolder])
    }

    /// Handles an event at `now`, a time of any monotonic clock, and returns the resulting actions, in order.
    #[must_use]
    pub(super) fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        if self.ending.has_reported() {
            self.leaving(&event);
            return mem::take(&mut self.actions);
        }
        match event {
            Event::FolderMade => self.act(Action::Connect),
            Event::Connected { here } => self.connected(here),
            Event::Failed(error) => {
                // A coordinator that was found but never asked would never answer.
                self.disconnect();
                self.fail(error);
            }
            Event::Reconnected => self.reconnected(),
            Event::Quiet(quiet) => self.quiet(quiet),
            Event::ConnectionLost { how, may_resume, closed } => {
                self.connection_lost(how, may_resume, closed);
            }
            Event::CoordinatorGone { how } => self.coordinator_gone(how),
            Event::Received(message) => self.received(message),
            Event::Line(line) => self.pass_line(line),
            Event::Prepared { attempt } => self.prepared(attempt),
            Event::Started(pids) => self.started(&pids),
            Event::StartFailed { attempt, error } => self.start_failed(attempt, error),
            Event::Exited { local_rank, exit_status } => self.exited(local_rank, exit_status),
            Event::Typed { local_rank, signal } => self.typed(local_rank, signal),
            Event::Exiting(ranks) => self.exiting(&ranks),
            Event::Tail { local_rank, tail } => self.tail(local_rank, tail),
            Event::DeviceFaults(faults) => self.device_faults(faults),
            Event::FailureDetails { local_rank, error, hint, device_faults } => {
                self.failure_details(local_rank, FailureDetails { error, hint, device_faults });
            }
            Event::Inspected(states) => self.inspected(&states),
            Event::Swept => self.swept(),
            Event::Drained => self.draining = self.draining.saturating_sub(1),
            Event::OutputClosed => self.output_closed(),
            Event::Signal(signal) => self.signal(signal),
            Event::OthersNotified => self.others_notified = true,
            Event::Tick => {}
        }
        self.advance();
        mem::take(&mut self.actions)
    }

    /// Returns the time at which to call again with [`Event::Tick`], if nothing else happens before.
    #[must_use]
    pub(super) fn deadline(&self) -> Option<Duration> {
        if self.ending.has_reported() {
            return self.ending.deadline();
        }
        let ended =
            self.ended.as_ref().filter(|ended| !ended.reported && self.attempt_to_stop.is_some());
        let ended = ended.map(|ended| ended.until);
        let group = self.group.as_ref().and_then(|group| group.deadline(&self.facts.limits));
        [ended, group, self.connection.deadline(), self.leave_at()].into_iter().flatten().min()
    }

    /// Performs the steps that are due, and those that follow from them.
    fn advance(&mut self) {
        self.advance_connection();
        self.advance_group();
        self.report_ended();
        self.start_next();
        self.leave_when_due();
        if let Some(result) = self.result() {
            self.begin_to_leave(result);
        } else if self.group.is_none() {
            self.look_again();
        }
    }

    /// Returns the result once no process of the job runs here any more and none will start.
    fn result(&mut self) -> Option<Result<Outcome, LaunchError>> {
        if self.group.is_some() || self.leaves_without_notice() {
            return None;
        }
        let (outcome, error) = match &mut self.ending {
            // The coordinator has the error, and decides how the job ends while it is connected.
            Ending::Decided { outcome: None, .. } if self.connection.is_up() => return None,
            Ending::Decided { outcome, error } => (outcome.take(), error.take()),
            Ending::No | Ending::Leaving(_) | Ending::Over => return None,
        };
        Some(match (self.stuck.take(), error, outcome) {
            (Some(ranks), _, outcome) => {
                Ok(Outcome::Stuck { ranks, otherwise: outcome.map(Box::new) })
            }
            (None, Some(error), _) => Err(error),
            (None, None, outcome) => Ok(outcome?),
        })
    }

    /// Records that this host cannot take part.
    fn fail(&mut self, error: LaunchError) {
        self.ending.fail(error);
        self.stop_quietly();
    }

    /// Records the outcome: the job is over as soon as nothing of it runs here.
    fn end_with(&mut self, outcome: Outcome) {
        self.ending.decide(outcome);
        self.stop_quietly();
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn send(&mut self, message: FromAgent) {
        self.act(Action::Send(message));
    }

    fn say(&mut self, text: impl Into<String>) {
        self.act(Action::Say(text.into()));
    }

    /// Shows a line from another process, once.
    fn pass_line(&mut self, line: String) {
        if self.reason.as_ref() != Some(&line) {
            self.say(line.clone());
            self.reason = Some(line);
        }
    }

    fn received(&mut self, message: ToAgent) {
        match message {
            ToAgent::Refused { reason } => self.refused(reason),
            ToAgent::Resumed => self.resumed(),
            ToAgent::Waiting { have, need } => {
                self.pass_line(if have < need {
                    format!("waiting for other hosts: {have} of {need} are there")
                } else {
                    "waiting to take part".to_owned()
                });
            }
            ToAgent::Start(part) => self.assigned(part),
            ToAgent::Stop { attempt, signal, reason } => self.stop(attempt, signal, reason),
            ToAgent::Kill => self.kill(),
            ToAgent::Signal { signal } => self.forward(signal),
            ToAgent::End(job_result) => {
                self.next = None;
                self.disconnect();
                let outcome = if self.output_closed {
                    Outcome::OutputClosed
                } else {
                    Outcome::Over(job_result)
                };
                self.end_with(outcome);
            }
            // Credit is for the forwarder of output; a heartbeat has no content.
            ToAgent::Taken { .. } | ToAgent::Beat => {}
        }
    }

    /// Shows why the ranks are stopped, unless the report at the end shows it immediately.
    fn explain(&mut self, reason: String, running: usize) {
        // A launcher of several hosts prints it once for all.
        if self.facts.kind == Kind::Launcher || self.interruption.is_some() || self.output_closed {
            return;
        }
        let goes_on = self.restarts.are_left() || self.hosts > 1;
        let said = self.reason.as_ref() == Some(&reason);
        let stopping = || format!("stopping {}", counted(running, "rank"));
        match (said, running) {
            (true, 0) => {}
            (true, _) => self.say(stopping()),
            (false, 0) if goes_on => self.say(reason.clone()),
            (false, 0) => {}
            (false, _) => self.say(format!("{reason}; {}", stopping())),
        }
        self.reason = Some(reason);
    }
}
