//! What ends an attempt, and what is left after it.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::failures::{self, Gone, Loss, News};
use super::member::{Member, Part};
use super::start_attempt::Gathering;
use super::{Action, AgentId, Formation, JobEvent, State};
use crate::{Cause, Ending, RankFailure, ToAgent, Verdict};

impl Formation {
    pub(super) fn failed(&mut self, agent: AgentId, failure: RankFailure) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        member.clock.compare(self.now, failure.at);
        let clock = member.clock;
        self.trouble.set_clock(agent, clock);
        let reason = self.with_restart(failure.summary());
        self.trouble.fail(agent, failure, clock);
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
        match member.part {
            Part::Stopping { finished } => {
                member.part = Part::Idle;
                member.join.port = port;
                member.stuck = stuck;
                self.trouble.cut_short |= killed || !finished;
            }
            Part::Running | Part::Finished => {
                let how = "it stopped its ranks without being told to".into();
                self.lose(agent, how, Gone::Useless(self.now));
            }
            Part::Idle => {}
        }
    }

    /// Takes a member out: it is no longer there, or no longer to be trusted.
    pub(super) fn lose(&mut self, agent: AgentId, how: String, gone: Gone) {
        let Some(member) = self.members.remove(&agent) else { return };
        if member.duplicate_of.is_some() {
            self.duplicates -= 1;
        }
        if !matches!(gone, Gone::Now(_)) {
            self.actions.push(Action::Close(agent));
        }
        let loss = Loss { host: member.join.host, how };
        if member.part != Part::Idle {
            let (host, reason) = (loss.host.clone(), loss.how.clone());
            self.record(JobEvent::Leave { host, reason });
        }
        match member.part {
            Part::Idle => self.gone(loss),
            Part::Running => {
                let reason = self.with_restart(format!("{} is lost: {}", loss.host, loss.how));
                self.trouble.lose(agent, loss, gone);
                self.stop(Signal::SIGTERM as i32, reason);
            }
            Part::Stopping { finished: false } => {
                self.say(format!("{} is lost: {}", loss.host, loss.how));
                self.trouble.lose(agent, loss, gone);
            }
            // Its work is done.
            Part::Finished | Part::Stopping { finished: true } => {}
        }
        self.hand_over_seat(agent);
    }

    /// A host goes as it should: what its ranks leave undone is no failure.
    pub(super) fn leaves(&mut self, agent: AgentId) {
        let Some(member) = self.members.remove(&agent) else { return };
        if member.duplicate_of.is_some() {
            self.duplicates -= 1;
        }
        self.actions.push(Action::Close(agent));
        let host = member.join.host.clone();
        self.record(JobEvent::Leave { host, reason: "its launcher was stopped".into() });
        let line = format!("{} leaves", member.join.host);
        if member.part == Part::Running {
            self.calm_stop(line);
        } else {
            self.say(line);
        }
        self.hand_over_seat(agent);
    }

    /// Stops the attempt for another with other hosts; nothing has failed.
    pub(super) fn calm_stop(&mut self, reason: String) {
        if matches!(self.state, State::Running) {
            self.trouble.calm_since = Some(self.now);
            self.stop(Signal::SIGTERM as i32, reason);
        } else {
            self.say(reason);
        }
    }

    /// What the user is told about trouble: whether the job starts again.
    fn with_restart(&self, reason: String) -> String {
        let (used, allowed) = (self.restarts, self.rules.max_restarts);
        if matches!(self.state, State::Running) && used < allowed {
            format!("{reason}; restart {} of {allowed}", used + 1)
        } else {
            reason
        }
    }

    /// A host that had no part is gone.
    pub(super) fn gone(&mut self, loss: Loss) {
        if matches!(self.state, State::Over(_)) {
            return;
        }
        let (host, reason) = (loss.host.clone(), loss.how.clone());
        self.record(JobEvent::Leave { host, reason });
        self.say(format!("{} is gone: {}", loss.host, loss.how));
        if let State::Gathering(gathering) = &mut self.state {
            gathering.loss = Some(loss);
        }
    }

    /// Stops the attempt everywhere, and says why.
    pub(super) fn stop(&mut self, signal: i32, reason: String) {
        self.tell_to_stop(signal, &reason);
        self.say(reason);
    }

    fn tell_to_stop(&mut self, signal: i32, reason: &str) {
        self.state = State::Stopping(self.now + self.rules.limits.stop());
        self.last_stop = Some((signal, reason.to_owned()));
        let attempt = self.attempt.unwrap_or_default();
        for (id, member) in &mut self.members {
            let finished = match member.part {
                Part::Idle => continue,
                Part::Running => false,
                Part::Finished => true,
                Part::Stopping { finished } => finished,
            };
            member.part = Part::Stopping { finished };
            let stop = ToAgent::Stop { attempt, signal, reason: reason.to_owned() };
            self.actions.push(Action::Send(*id, stop));
        }
    }

    /// The job was asked to stop: by the user of this agent, or of the coordinator, who has then
    /// been told so there.
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
                self.end(failures::verdict(Cause::Interrupted { signal, failure: None }));
            }
            (_, Some(standby)) if waits && !self.has_stopped(standby) => {
                // The job goes on without it.
                let verdict = failures::verdict(Cause::Interrupted { signal, failure: None });
                self.send(standby, ToAgent::End(verdict));
                self.lose(standby, named, Gone::Useless(self.now));
            }
            (State::Running, _) => {
                self.trouble.interrupt(signal, by);
                self.trouble.interrupted = Some(signal);
                self.stop_for(signal, named, by);
            }
            (State::Stopping(_), _) => {
                let ending = self.ending();
                let news = self.trouble.interrupt(signal, by);
                let impatient = match self.trouble.interrupted {
                    Some(_) => news == News::Again,
                    None => ending,
                };
                if !ending {
                    self.trouble.interrupted = Some(signal);
                }
                if impatient && signal == Signal::SIGINT as i32 {
                    self.kill();
                } else if news != News::Echo && !self.trouble.killed {
                    self.stop_for(signal, named, by);
                }
            }
        }
    }

    fn stop_for(&mut self, signal: i32, reason: String, by: Option<AgentId>) {
        match by {
            Some(_) => self.stop(signal, reason),
            None => self.tell_to_stop(signal, &reason),
        }
    }

    /// It took part in the attempt that is being stopped, and is done.
    fn has_stopped(&self, agent: AgentId) -> bool {
        matches!(self.state, State::Stopping(_))
            && self.members.get(&agent).is_some_and(|member| member.previous_member)
    }

    fn kill(&mut self) {
        if std::mem::replace(&mut self.trouble.killed, true) {
            return;
        }
        self.state = State::Stopping(self.now + self.rules.limits.kill());
        for (id, member) in &self.members {
            if matches!(member.part, Part::Stopping { .. }) {
                self.actions.push(Action::Send(*id, ToAgent::Kill));
            }
        }
    }

    /// Tells an agent that has come back what it may not have heard.
    pub(super) fn stop_again(&mut self, agent: AgentId) {
        let Some((signal, reason)) = self.last_stop.clone() else { return };
        let attempt = self.attempt.unwrap_or_default();
        self.send(agent, ToAgent::Stop { attempt, signal, reason });
        let limits = self.rules.limits;
        let wait = if self.trouble.killed { limits.kill() } else { limits.stop() };
        if self.trouble.killed {
            self.send(agent, ToAgent::Kill);
        }
        if let State::Stopping(until) = &mut self.state {
            *until = (*until).max(self.now + wait);
        }
    }

    /// Hosts whose ranks cannot be killed take part in nothing more.
    fn let_stuck_go(&mut self) -> Option<Loss> {
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
            loss = Some(Loss { host, how });
        }
        loss
    }

    /// All agents have stopped the attempt.
    pub(super) fn settle(&mut self) {
        let trouble = std::mem::take(&mut self.trouble);
        let first = trouble.first();
        if let Some(signal) = trouble.interrupted {
            return self.end(trouble.interrupted_by(signal));
        }
        let calm = first.is_none();
        let mut loss = None;
        if calm {
            self.record_change();
        }
        if let Some(cause) = first {
            if self.restarts >= self.rules.max_restarts {
                return self.end(failures::verdict(cause));
            }
            self.restarts += 1;
            self.record_cause(&cause);
            if let Cause::HostLost { host, how } = cause {
                loss = Some(Loss { host, how });
            }
        }
        let (restarts, max_restarts) = (self.restarts, self.rules.max_restarts);
        let attempt = self.attempt.unwrap_or_default();
        self.record(JobEvent::Restart { attempt, restarts, max_restarts });
        let loss = self.let_stuck_go().or(loss);
        self.state = State::Gathering(Gathering::again(self.now, calm, loss));
    }

    /// The attempt is being stopped, and there will be no other.
    pub(super) fn ending(&self) -> bool {
        matches!(self.state, State::Stopping(_))
            && (self.trouble.interrupted.is_some()
                || self.trouble.first().is_some() && self.restarts >= self.rules.max_restarts)
    }

    pub(super) fn end(&mut self, mut verdict: Verdict) {
        if self.stuck && verdict.code != 0 {
            // Something is left that a scheduler, or a user, has to know of.
            verdict.code = Ending::Signal(Signal::SIGKILL as i32).exit_code();
        }
        if let Some(cause) = &verdict.cause {
            self.record_cause(cause);
        }
        self.record(JobEvent::End { code: verdict.code });
        for (id, _) in self.members.iter().filter(|(_, member)| member.away.is_none()) {
            self.actions.push(Action::Send(*id, ToAgent::End(verdict.clone())));
            self.actions.push(Action::Close(*id));
        }
        self.actions.extend(self.expected.keys().map(|id| Action::Close(*id)));
        self.expected.clear();
        // The others may come back over a new connection.
        self.members.retain(|_, member| member.remote);
        let away = |member: &&Member| member.away.is_some();
        let absent: Vec<&str> =
            self.members.values().filter(away).map(|member| &*member.join.host).collect();
        if !absent.is_empty() {
            let line =
                format!("the job is over; {} may come back to hear of it", absent.join(", "));
            self.say(line);
        }
        self.actions.push(Action::Finish(verdict.clone()));
        self.state = State::Over(verdict);
        let until = |member: &Member| Some(member.away.as_ref()?.until);
        self.next_look = self.members.values().filter_map(until).min().unwrap_or(Duration::MAX);
    }
}
