//! The connection to the coordinator: how it is found, lost, resumed, or given up.

use std::time::Duration;

use brigade_rendezvous::FromAgent;
use nix::sys::signal::Signal;

use super::attempt::Group;
use super::ending::{Ending, Interruption, StopRequest};
use super::event::{Action, JoinRequest, LastPart};
use super::{AgentState, Kind};
use crate::{LaunchError, Outcome};

/// State of the connection to the coordinator.
#[derive(Debug)]
pub(super) enum Connection {
    /// The coordinator is being searched for.
    Searching,
    Up {
        /// `true` if the coordinator is in this process.
        here: bool,
        /// `true` if no data has been received for the quiet limit: a new connection is attempted beside this one.
        quiet: bool,
    },
    /// The connection broke. The ranks continue until the time limit, while the agent reconnects.
    Resuming { since: Duration, until: Duration, how: String },
    /// The connection is lost and cannot be restored. If `look_again`, another coordinator is looked for once nothing
    /// runs here.
    Gone { look_again: bool },
}

impl Connection {
    /// Returns `true` if there is a coordinator that can be reached, now or after a reconnection.
    pub(super) fn is_up(&self) -> bool {
        matches!(self, Self::Up { .. } | Self::Resuming { .. })
    }

    pub(super) fn is_resuming(&self) -> bool {
        matches!(self, Self::Resuming { .. })
    }

    /// Returns `true` if messages sent now may be lost.
    fn is_cut(&self) -> bool {
        matches!(self, Self::Resuming { .. } | Self::Up { quiet: true, .. })
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        match self {
            Self::Resuming { until, .. } => Some(*until),
            _ => None,
        }
    }
}

impl AgentState {
    pub(super) fn connected(&mut self, here: bool) {
        self.connection = Connection::Up { here, quiet: false };
        self.others_notified = false;
        let request = self.join_request(false);
        self.act(Action::Join(request));
    }

    fn join_request(&self, resume: bool) -> JoinRequest {
        let running = self.group.as_ref().map(|group| &group.part);
        let running = running.or(self.next.as_ref()).filter(|_| resume);
        let running =
            running.map(|part| LastPart { attempt: part.attempt, node_rank: part.node_rank });
        let ended = self.ended.as_ref();
        let ended =
            ended.map(|ended| LastPart { attempt: ended.attempt, node_rank: ended.node_rank });
        JoinRequest { resume, last: running.or(ended), restarts: self.restarts.used }
    }

    /// Returns `true` if the agent may reconnect. A launcher's sessions end with the launcher. A host that cannot take
    /// part need not come back, and one that leaves only has to report that.
    fn can_resume(&self) -> bool {
        matches!(self.facts.kind, Kind::Peers | Kind::Elected)
            && self.ending.outcome().is_none()
            && self.ending.error().is_none()
    }

    pub(super) fn quiet(&mut self, is_quiet: bool) {
        let can_resume = self.can_resume();
        let Connection::Up { here: false, quiet } = &mut self.connection else { return };
        if is_quiet && !can_resume || std::mem::replace(quiet, is_quiet) == is_quiet {
            return;
        }
        let (coordinator, limits) = (&self.facts.coordinator, self.facts.limits);
        if is_quiet {
            let line = format!(
                "no message from the coordinator at {coordinator} for {} s; the ranks continue for up to \
                 {} s",
                limits.quiet().as_secs_f64(),
                (limits.heartbeat_timeout() - limits.quiet()).as_secs_f64(),
            );
            self.act(Action::Reconnect { patient: true });
            self.say(line);
        } else {
            let line = format!("the coordinator at {coordinator} sends messages again");
            self.act(Action::StopReconnecting);
            self.say(line);
        }
    }

    pub(super) fn connection_lost(&mut self, how: String, may_resume: bool, closed: bool) {
        let may_resume = may_resume && (self.can_resume() || self.leaves() && !closed);
        match self.connection {
            Connection::Up { here: false, .. } if may_resume => {
                let until = self.now + self.facts.limits.heartbeat_timeout();
                self.act(Action::Reconnect { patient: false });
                self.connection = Connection::Resuming { since: self.now, until, how };
            }
            Connection::Up { .. } => self.lost(how),
            // The search was for a connection that was to replace it; the next one is tried.
            Connection::Searching | Connection::Resuming { .. } | Connection::Gone { .. } => {}
        }
    }

    pub(super) fn coordinator_gone(&mut self, how: String) {
        match &mut self.connection {
            // The first description is more useful than that no coordinator answers now.
            Connection::Resuming { how, .. } => {
                let how = std::mem::take(how);
                self.lost(how);
            }
            Connection::Up { quiet: true, .. } => self.lost(how),
            _ => {}
        }
    }

    pub(super) fn reconnected(&mut self) {
        if self.connection.is_cut() {
            let request = self.join_request(true);
            self.act(Action::Join(request));
        }
    }

    /// Handles the answer that the coordinator has kept this host's seat. Messages since the loss may not have arrived:
    /// necessary ones are repeated, and the coordinator ignores those that it has received.
    pub(super) fn resumed(&mut self) {
        let told = match &self.connection {
            Connection::Resuming { since, .. } => Some(self.now - *since),
            Connection::Up { quiet: true, .. } => Some(self.facts.limits.quiet()),
            _ => return,
        };
        self.connection = Connection::Up { here: false, quiet: false };
        if let Some(time) = told {
            let coordinator = &self.facts.coordinator;
            let line =
                format!("connected to {coordinator} again after {:.1} s", time.as_secs_f64());
            self.say(line);
        }
        for message in self.recorded.clone() {
            self.send(message);
        }
        if let Some(failure) = self.failure.clone() {
            self.send(FromAgent::Failed(failure));
        }
        if let Some(ended) = self.ended.as_ref().filter(|ended| ended.reported && ended.finished) {
            let attempt = ended.attempt;
            self.send(FromAgent::Finished { attempt });
        }
        if self.leaves() {
            self.send(FromAgent::Leaving);
        } else if let Some(StopRequest { signal, count }) = self.stop_request {
            self.send(FromAgent::Interrupted { signal: signal as i32, count });
        }
        if let Some(error) = self.ending.error() {
            let reason = error.to_string();
            self.send(FromAgent::Unable { reason });
        }
    }

    fn leaves(&self) -> bool {
        matches!(self.ending.outcome(), Some(Outcome::Left { .. }))
    }

    /// Returns `true` if this host leaves and the coordinator may not have been informed: it would take the host for
    /// lost, which costs a restart.
    pub(super) fn leaves_without_notice(&self) -> bool {
        self.leaves() && self.connection.is_cut()
    }

    pub(super) fn refused(&mut self, reason: String) {
        if self.connection.is_cut() {
            self.lost(reason);
        } else {
            self.disconnect();
            self.fail(LaunchError::Refused { reason });
        }
    }

    pub(super) fn disconnect(&mut self) {
        self.connection = Connection::Gone { look_again: false };
        self.act(Action::Disconnect);
    }

    pub(super) fn advance_connection(&mut self) {
        if let Connection::Resuming { until, how, .. } = &self.connection
            && *until <= self.now
        {
            let limit = self.facts.limits.heartbeat_timeout().as_secs_f64();
            let how = format!("{how}, and it could not be made again within {limit} s");
            self.lost(how);
        }
    }

    /// Handles the loss of the coordinator: the ranks of this host cannot continue alone.
    pub(super) fn lost(&mut self, how: String) {
        self.disconnect();
        (self.next, self.attempt_to_stop) = (None, None);
        if self.group.as_ref().is_some_and(Group::is_preparing) {
            self.group = None;
        }
        if self.facts.forwards_output {
            self.act(Action::DropOutput);
        }
        // A new coordinator counts the loss of the old one as a restart.
        let may_go_on = self.ended.is_none() && self.group.is_none() || self.restarts.are_left();
        let again = may_go_on && self.facts.kind == Kind::Elected && self.stuck.is_none();
        self.ended.iter_mut().for_each(|ended| ended.reported = true);
        if matches!(self.ending, Ending::Decided { .. }) {
            return self.stop_quietly();
        }
        if let Some(Interruption { signal, .. }) = self.interruption {
            return self.end_with(Outcome::Stopped { signal: signal as i32 });
        }
        if self.output_closed {
            return self.end_with(Outcome::OutputClosed);
        }
        if again {
            self.say(format!(
                "the connection to the coordinator is lost: {how}; looking for the others"
            ));
            self.connection = Connection::Gone { look_again: true };
            self.stop_quietly();
        } else {
            let coordinator = self.facts.coordinator.clone();
            let replaceable = self.facts.kind == Kind::Elected;
            self.end_with(Outcome::Lost { coordinator, how, replaceable });
        }
    }

    /// Looks for another coordinator once the last one is lost and nothing runs here any more.
    pub(super) fn look_again(&mut self) {
        if matches!(self.connection, Connection::Gone { look_again: true }) {
            self.connection = Connection::Searching;
            self.act(Action::Connect);
        }
    }

    /// Requests from the coordinator that the job stops, or that this host may leave.
    pub(super) fn ask_to_stop(&mut self, signal: Signal) {
        let number = signal as i32;
        let count = self.stop_request.map_or(1, |last| last.count.saturating_add(1));
        self.stop_request = Some(StopRequest { signal, count });
        if self.leaves_alone() {
            self.send(FromAgent::Leaving);
            self.ending.decide(Outcome::Left { signal: number });
        } else if self.connection.is_up() {
            self.send(FromAgent::Interrupted { signal: number, count });
        } else {
            self.ending.decide(Outcome::Stopped { signal: number });
        }
    }

    /// Returns `true` if the job can continue without this host.
    pub(super) fn leaves_alone(&self) -> bool {
        let served_here = matches!(self.connection, Connection::Up { here: true, .. });
        self.facts.may_leave && self.connection.is_up() && !served_here
    }
}
