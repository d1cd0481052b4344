//! Stopping of an attempt, and its consequence: another attempt, or the end of the job.

use std::mem;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::failures::{self, HostLoss, Interruption, LastSeen};
use super::gathering::Gathering;
use super::member::{Activity, Member};
use super::{Action, AgentId, Formation, JobEvent, State};
use crate::{Cause, ExitStatus, JobResult, RankFailure, ToAgent};

impl Formation {
    pub(super) fn failed(&mut self, agent: AgentId, failure: RankFailure) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        member.clock.compare(self.now, failure.at);
        let clock = member.clock;
        self.failures.set_clock(agent, clock);
        let reason = self.with_restart(failure.summary());
        self.failures.fail(agent, failure, clock);
        if matches!(self.state, State::Running) {
            self.stop(Signal::SIGTERM as i32, reason);
        }
    }

    pub(super) fn stopped(
        &mut self,
        agent: AgentId,
        port: u16,
        killed: bool,
        stuck: Option<String>,
    ) {
        self.stuck |= stuck.is_some();
        let Some(member) = self.members.get_mut(&agent) else { return };
        match member.activity {
            Activity::Stopping { finished } => {
                member.activity = Activity::Idle;
                member.join.port = port;
                member.stuck = stuck;
                self.failures.cut_short |= killed || !finished;
            }
            Activity::Running | Activity::Finished => {
                let how = "it stopped its ranks without a request to do so".into();
                self.lose(agent, how, LastSeen::Unresponsive(self.now));
            }
            Activity::Idle => {}
        }
    }

    /// Returns `true` if the member was ordered to stop and is given up when its time limit passes. A disconnected
    /// member is waited for as long as its seat is kept, unless the user waits.
    pub(super) fn may_be_stuck(&self, member: &Member) -> bool {
        let is_waited_for = member.disconnection.is_some() && !self.failures.killed;
        matches!(member.activity, Activity::Stopping { .. }) && !is_waited_for
    }

    pub(super) fn check_stop_deadline(&mut self) {
        let State::Stopping(until) = self.state else { return };
        if self.now < until {
            return;
        }
        let stuck = self.members.iter().filter(|(_, member)| self.may_be_stuck(member));
        let ids = stuck.map(|(id, _)| *id);
        for id in ids.collect::<Vec<_>>() {
            self.lose(id, "it did not stop its ranks".into(), LastSeen::Unresponsive(self.now));
        }
    }

    /// Stops the attempt without a failure, for another one with other hosts.
    pub(super) fn stop_for_membership_change(&mut self, reason: String) {
        if matches!(self.state, State::Running) {
            self.failures.membership_changed_at = Some(self.now);
            self.stop(Signal::SIGTERM as i32, reason);
        } else {
            self.say(reason);
        }
    }

    /// Appends to the reason whether the job starts again.
    pub(super) fn with_restart(&self, reason: String) -> String {
        let (used, allowed) = (self.restarts, self.rules.max_restarts);
        if matches!(self.state, State::Running) && used < allowed {
            format!("{reason}; restart {} of {allowed}", used + 1)
        } else {
            reason
        }
    }

    /// Stops the attempt on all hosts, with a reason.
    pub(super) fn stop(&mut self, signal: i32, reason: String) {
        self.send_stop(signal, &reason);
        self.say(reason);
    }

    fn send_stop(&mut self, signal: i32, reason: &str) {
        self.state = State::Stopping(self.now + self.rules.limits.stop());
        self.last_stop = Some((signal, reason.to_owned()));
        let attempt = self.attempt.unwrap_or_default();
        for (id, member) in &mut self.members {
            let finished = match member.activity {
                Activity::Idle => continue,
                Activity::Running => false,
                Activity::Finished => true,
                Activity::Stopping { finished } => finished,
            };
            member.activity = Activity::Stopping { finished };
            let stop = ToAgent::Stop { attempt, signal, reason: reason.to_owned() };
            self.actions.push(Action::Send(*id, stop));
        }
    }

    /// Handles a request to stop the job, by the user of this agent or of the coordinator. That user has been informed
    /// on the host of the request.
    pub(super) fn interrupt(&mut self, signal: i32, by: Option<AgentId>) {
        let member = by.and_then(|id| self.members.get(&id));
        let named = match member {
            Some(member) => format!("{} on {}", failures::name(signal), member.join.host),
            None => failures::name(signal),
        };
        let waits = member.is_some_and(|member| !member.takes_part());
        match (&self.state, by) {
            (State::Over(_), _) => {}
            (State::Gathering(_), _) => {
                self.end(failures::job_result(Cause::Interrupted { signal, failure: None }));
            }
            (_, Some(standby)) if waits && !self.has_stopped(standby) => {
                // The job continues without it.
                let job_result = failures::job_result(Cause::Interrupted { signal, failure: None });
                self.send(standby, ToAgent::End(job_result));
                self.lose(standby, named, LastSeen::Unresponsive(self.now));
            }
            (State::Running, _) => {
                self.failures.interrupt(signal, by);
                self.failures.interrupted = Some(signal);
                self.stop_for(signal, named, by);
            }
            (State::Stopping(_), _) => {
                let is_ending = self.is_ending();
                let news = self.failures.interrupt(signal, by);
                let impatient = match self.failures.interrupted {
                    Some(_) => news == Interruption::Again,
                    None => is_ending,
                };
                if !is_ending {
                    self.failures.interrupted = Some(signal);
                }
                if impatient && signal == Signal::SIGINT as i32 {
                    self.kill();
                } else if news != Interruption::Echo && !self.failures.killed {
                    self.stop_for(signal, named, by);
                }
            }
        }
    }

    fn stop_for(&mut self, signal: i32, reason: String, by: Option<AgentId>) {
        match by {
            Some(_) => self.stop(signal, reason),
            None => self.send_stop(signal, &reason),
        }
    }

    /// Returns `true` if the agent took part in the attempt that is being stopped, and has stopped.
    fn has_stopped(&self, agent: AgentId) -> bool {
        matches!(self.state, State::Stopping(_))
            && self.members.get(&agent).is_some_and(|member| member.previous_member)
    }

    fn kill(&mut self) {
        if mem::replace(&mut self.failures.killed, true) {
            return;
        }
        self.state = State::Stopping(self.now + self.rules.limits.kill());
        for (id, member) in &self.members {
            if matches!(member.activity, Activity::Stopping { .. }) {
                self.actions.push(Action::Send(*id, ToAgent::Kill));
            }
        }
    }

    /// Repeats the stop to an agent that has reconnected and may have missed it.
    pub(super) fn repeat_stop(&mut self, agent: AgentId) {
        let Some((signal, reason)) = self.last_stop.clone() else { return };
        let attempt = self.attempt.unwrap_or_default();
        self.send(agent, ToAgent::Stop { attempt, signal, reason });
        let limits = self.rules.limits;
        let wait = if self.failures.killed { limits.kill() } else { limits.stop() };
        if self.failures.killed {
            self.send(agent, ToAgent::Kill);
        }
        if let State::Stopping(until) = &mut self.state {
            *until = (*until).max(self.now + wait);
        }
    }

    /// Excludes hosts whose ranks cannot be killed from further attempts.
    fn dismiss_stuck_hosts(&mut self) -> Option<HostLoss> {
        let stuck = |(id, member): (&AgentId, &Member)| Some((*id, member.stuck.clone()?));
        let mut loss = None;
        for (id, how) in self.members.iter().filter_map(stuck).collect::<Vec<_>>() {
            let Some(member) = self.members.remove(&id) else { continue };
            let host = member.join.host;
            self.record(JobEvent::Leave { host: host.clone(), reason: how.clone() });
            self.say(format!("{host} is lost: {how}"));
            self.send(id, ToAgent::Refused { reason: how.clone() });
            self.actions.push(Action::Close(id));
            self.hand_over_seat(id);
            loss = Some(HostLoss { host, how });
        }
        loss
    }

    /// Continues after all agents have stopped the attempt.
    pub(super) fn settle(&mut self) {
        let failures = mem::take(&mut self.failures);
        let first = failures.first();
        if let Some(signal) = failures.interrupted {
            return self.end(failures.interrupted_by(signal));
        }
        let membership_changed = first.is_none();
        let mut loss = None;
        if membership_changed {
            self.record_change();
        }
        if let Some(cause) = first {
            if self.restarts >= self.rules.max_restarts {
                return self.end(failures::job_result(cause));
            }
            self.restarts += 1;
            self.record_cause(&cause);
            if let Cause::HostLost { host, how } = cause {
                loss = Some(HostLoss { host, how });
            }
        }
        let (restarts, max_restarts) = (self.restarts, self.rules.max_restarts);
        let attempt = self.attempt.unwrap_or_default();
        self.record(JobEvent::Restart { attempt, restarts, max_restarts });
        let loss = self.dismiss_stuck_hosts().or(loss);
        self.state = State::Gathering(Gathering::again(self.now, membership_changed, loss));
    }

    /// Returns `true` if the attempt is being stopped and no other will follow.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.state, State::Stopping(_))
            && (self.failures.interrupted.is_some()
                || self.failures.first().is_some() && self.restarts >= self.rules.max_restarts)
    }

    pub(super) fn end(&mut self, mut job_result: JobResult) {
        if self.stuck && job_result.code != 0 {
            // A process is left, which has to be reported to a scheduler or a user.
            job_result.code = ExitStatus::Signal(Signal::SIGKILL as i32).exit_code();
        }
        if let Some(cause) = &job_result.cause {
            self.record_cause(cause);
        }
        self.record(JobEvent::End { code: job_result.code });
        for (id, _) in self.members.iter().filter(|(_, member)| member.disconnection.is_none()) {
            self.actions.push(Action::Send(*id, ToAgent::End(job_result.clone())));
            self.actions.push(Action::Close(*id));
        }
        self.actions.extend(self.expected.keys().map(|id| Action::Close(*id)));
        self.expected.clear();
        // The others may come back over a new connection.
        self.members.retain(|_, member| member.remote);
        let away = |member: &&Member| member.disconnection.is_some();
        let absent: Vec<&str> =
            self.members.values().filter(away).map(|member| &*member.join.host).collect();
        if !absent.is_empty() {
            let line = format!(
                "the job is over; waiting for {} to reconnect and receive the result",
                absent.join(", ")
            );
            self.say(line);
        }
        self.actions.push(Action::Finish(job_result.clone()));
        self.state = State::Over(job_result);
        let until = |member: &Member| Some(member.disconnection.as_ref()?.until);
        self.next_look = self.members.values().filter_map(until).min().unwrap_or(Duration::MAX);
    }
}
