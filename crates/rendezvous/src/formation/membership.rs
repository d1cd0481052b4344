//! Membership: hosts that join, are silent, reconnect, and leave.

use std::mem;
use std::time::Duration;

use brigade_rank_env::text::counted;
use nix::sys::signal::Signal;

use super::admission::JOINED_LATELY;
use super::failures::{HostLoss, LastSeen};
use super::member::{Activity, Clock, Disconnection, Member};
use super::rules::MAX_RANKS_PER_HOST;
use super::{Action, AgentId, Formation, JobEvent, State};
use crate::{Join, PROTOCOL, ToAgent};

impl Formation {
    pub(super) fn joined(
        &mut self,
        agent: AgentId,
        join: Join,
        seen: Option<String>,
        remote: bool,
    ) {
        let seat = self.seat_of(&join).filter(|_| join.last_attempt.is_none());
        match (join.resume, seat) {
            // The first request was lost in transit. The host has taken part in no attempt, and counts as new.
            (1.., None) if join.last_attempt.is_none() => {}
            (1.., _) => return self.resumes(agent, &join),
            // The first request, which was received after the second one.
            (0, Some(seat)) if self.members[&seat].resumes > 0 => {
                return self.actions.push(Action::Close(agent));
            }
            (0, _) => {}
        }
        if self.expected.remove(&agent).is_none() {
            self.announced += 1;
        }
        if self.members.contains_key(&agent) {
            return self.lose(agent, "it joined twice".into(), LastSeen::Unresponsive(self.now));
        }
        if let Some(reason) = self.refusal(&join) {
            return self.refuse(agent, &join.host, reason);
        }
        let duplicate_of = join.node_rank.and_then(|wanted| {
            let holds = |member: &Member| member.join.node_rank == Some(wanted);
            self.members.iter().find(|(_, member)| holds(member)).map(|(id, _)| *id)
        });
        if let Some(duplicate_of) = duplicate_of
            && !self.members[&duplicate_of].remote
        {
            let reason = self.taken(&join, duplicate_of);
            return self.refuse(agent, &join.host, reason);
        }
        let mut clock = Clock::default();
        clock.compare(self.now, join.sent);
        if let Some(last) = join.last_attempt {
            self.next_attempt = self.next_attempt.max(last + 1);
        }
        self.joins += 1;
        if join.resume > 0 {
            self.send(agent, ToAgent::Resumed);
        }
        let member = Member {
            resumes: join.resume,
            seen,
            remote,
            order: self.joins,
            joined: self.now,
            previous_member: false,
            duplicate_of,
            activity: Activity::Idle,
            assignment: None,
            ranks: Vec::new(),
            requests: 0,
            stuck: None,
            disconnection: None,
            quiet: false,
            last_message: self.now,
            clock,
            join,
        };
        if remote {
            let quiet = self.now.saturating_add(self.rules.limits.quiet());
            self.next_look = self.next_look.min(quiet);
        }
        self.members.insert(agent, member);
        if duplicate_of.is_none() {
            self.arrived(agent);
        } else {
            self.duplicates += 1;
        }
    }

    /// Handles an agent that has lost its connection, or found it silent, and comes over a new one.
    ///
    /// Messages in transit to it may be lost, so they are sent again; the agent does the same. Both sides ignore
    /// messages that they have received already.
    pub(super) fn resumes(&mut self, connection: AgentId, join: &Join) {
        if let Some(reason) = self.foreign(join) {
            return self.refuse(connection, &join.host, reason);
        }
        let attempt = self.attempt;
        let seat = self.seat_of(join).filter(|_| join.last_attempt <= attempt);
        let Some((id, member)) = seat.and_then(|id| Some((id, self.members.get_mut(&id)?))) else {
            let reason = format!(
                "{} (pid {}) is not part of the job any more: it was considered lost",
                join.host, join.pid
            );
            return self.refuse(connection, &join.host, reason);
        };
        if join.resume <= member.resumes {
            // This connection was slow, and a later one was received before it.
            self.actions.push(Action::Close(connection));
            return;
        }
        member.resumes = join.resume;
        let was_told = member.disconnection.take().is_some() | mem::take(&mut member.quiet);
        member.last_message = self.now;
        member.clock.compare(self.now, join.sent);
        let (part, port) = (member.activity, join.port);
        let quiet = self.now.saturating_add(self.rules.limits.quiet());
        self.next_look = self.next_look.min(quiet);
        if part == Activity::Idle {
            member.join.port = port;
        }
        let start = member.assignment.clone().filter(|_| join.last_attempt != attempt);
        self.actions.push(Action::Adopt { agent: id, connection });
        if was_told && !matches!(self.state, State::Over(_)) {
            self.say(format!("{} is connected again", join.host));
        }
        self.send(id, ToAgent::Resumed);
        match (&self.state, part) {
            (State::Over(job_result), _) => {
                let job_result = job_result.clone();
                self.members.remove(&id);
                self.send(id, ToAgent::End(job_result));
                self.actions.push(Action::Close(id));
            }
            (State::Running, Activity::Running) => {
                if let Some(start) = start {
                    self.send(id, ToAgent::Start(start));
                }
            }
            // It has not even received the attempt that is being stopped.
            (State::Stopping(_), Activity::Stopping { .. }) if start.is_some() => {
                self.stopped(id, port, false, None);
            }
            (State::Stopping(_), Activity::Stopping { .. }) => self.repeat_stop(id),
            _ => {}
        }
    }

    /// Returns the member that this agent is already, if any.
    fn seat_of(&self, join: &Join) -> Option<AgentId> {
        let is_it = |member: &Member| {
            member.remote && !join.agent.is_empty() && member.join.agent == join.agent
        };
        self.members.iter().find(|(_, member)| is_it(member)).map(|(id, _)| *id)
    }

    /// Returns the reason why this agent does not belong here.
    fn foreign(&self, join: &Join) -> Option<String> {
        let host = &join.host;
        if join.protocol != PROTOCOL {
            return Some(format!(
                "{host} has brigade {} (protocol {}), the coordinator has {} (protocol \
                 {PROTOCOL}): install the same version on all hosts",
                join.version,
                join.protocol,
                env!("CARGO_PKG_VERSION"),
            ));
        }
        if join.run_id != self.rules.run_id {
            return Some(format!(
                "{host} takes part in another job: give the same --rdzv-id on all hosts, or another \
                 endpoint to one of the jobs"
            ));
        }
        None
    }

    /// Returns the reason why this agent cannot take part, whatever the others do.
    fn refusal(&self, join: &Join) -> Option<String> {
        let foreign = self.foreign(join);
        if foreign.is_some() {
            return foreign;
        }
        let host = &join.host;
        if let State::Over(job_result) = &self.state {
            return Some(format!("the job is over (exit code {})", job_result.code));
        }
        if self.is_ending() {
            return Some("the job is ending".into());
        }
        if let Some(wanted) = join.node_rank
            && wanted >= self.rules.max_nodes
        {
            return Some(format!(
                "{host} has node rank {wanted}, but with {} the highest is {}",
                counted(self.rules.max_nodes, "host"),
                self.rules.max_nodes - 1,
            ));
        }
        if join.nproc == 0 || join.nproc > MAX_RANKS_PER_HOST {
            return Some(format!(
                "{host} would start {} ranks; a host starts 1 to {MAX_RANKS_PER_HOST}",
                join.nproc,
            ));
        }
        // Attempts are numbered upwards from there, and no number is used twice.
        (join.last_attempt.is_some_and(|last| last > u32::MAX / 2)).then(|| {
            format!("{host} cannot have seen attempt {}", join.last_attempt.unwrap_or_default())
        })
    }

    fn taken(&self, join: &Join, duplicate_of: AgentId) -> String {
        let other = &self.members[&duplicate_of].join;
        format!(
            "{} (pid {}) has node rank {} already; {} (pid {}) needs another --node-rank",
            other.host,
            other.pid,
            other.node_rank.unwrap_or_default(),
            join.host,
            join.pid,
        )
    }

    fn refuse(&mut self, agent: AgentId, host: &str, reason: String) {
        if self.members.remove(&agent).is_some_and(|member| member.duplicate_of.is_some()) {
            self.duplicates -= 1;
        }
        if let State::Gathering(gathering) = &mut self.state {
            let how = format!("it was refused: {reason}");
            gathering.loss = Some(HostLoss { host: host.into(), how });
        }
        self.say(format!("refused {host}: {reason}"));
        self.send(agent, ToAgent::Refused { reason });
        self.actions.push(Action::Close(agent));
    }

    /// Handles a host that has joined and on which the job can count.
    fn arrived(&mut self, agent: AgentId) {
        let Join { host, nproc, .. } = self.members[&agent].join.clone();
        self.record(JobEvent::Join { host: host.clone(), nproc });
        match self.state {
            State::Gathering(_) => {
                // Where all come at once, the order of arrival is not reported.
                if self.rules.late_hosts {
                    let (present, wanted) = (self.present(), self.rules.wanted());
                    self.say(format!("{host} joined: {present} of {wanted}"));
                }
                self.advance();
            }
            State::Running => {
                let wait = self.admission_wait();
                let is_new = self.members[&agent].is_new();
                if self.has_room() && !is_new {
                    self.stop_for_membership_change(format!("{host} joins"));
                } else if self.has_room() && wait.is_zero() {
                    self.admit(format!("{host} joins"));
                } else if self.has_room() {
                    self.say(format!(
                        "{host} waits {} s before it joins: {JOINED_LATELY}",
                        wait.as_secs_f64().ceil()
                    ));
                } else {
                    self.say(format!("{host} waits: it may take the place of a host that is lost"));
                }
            }
            State::Stopping(_) | State::Over(_) => {}
        }
        let waits = self.members.get(&agent).is_some_and(|member| !member.takes_part())
            && !matches!(self.state, State::Over(_));
        if waits && self.rules.late_hosts {
            let (have, need) = (self.present(), self.rules.min_nodes);
            self.send(agent, ToAgent::Waiting { have, need });
        }
    }

    /// Gives the node rank of a lost host to the first host that waits for it.
    pub(super) fn hand_over_seat(&mut self, lost: AgentId) {
        let waits = |(_, member): &(&AgentId, &Member)| member.duplicate_of == Some(lost);
        let successor = self.members.iter().filter(waits).min_by_key(|(_, member)| member.order);
        let Some(successor) = successor.map(|(id, _)| *id) else { return };
        for (id, member) in &mut self.members {
            if member.duplicate_of == Some(lost) {
                member.duplicate_of = (*id != successor).then_some(successor);
            }
        }
        self.duplicates -= 1;
        self.arrived(successor);
    }

    /// Records a sign of life of an agent.
    pub(super) fn note_sign_of_life(&mut self, agent: AgentId) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        member.last_message = self.now;
        if mem::take(&mut member.quiet) {
            let line = format!("{} sends messages again", member.join.host);
            self.say(line);
        }
        if self.duplicates == 0 || matches!(self.state, State::Over(_)) {
            return;
        }
        // Hosts that requested this host's node rank in the meantime are therefore refused.
        let vain = |(_, member): &(&AgentId, &Member)| {
            member.duplicate_of == Some(agent) && member.joined < self.now
        };
        let duplicates: Vec<_> = self.members.iter().filter(vain).map(|(id, _)| *id).collect();
        for duplicate_of in duplicates {
            let join = self.members[&duplicate_of].join.clone();
            let reason = self.taken(&join, agent);
            self.refuse(duplicate_of, &join.host, reason);
        }
    }

    pub(super) fn closed(&mut self, agent: AgentId, how: String) {
        if matches!(self.state, State::Over(_)) {
            // It has been informed, or will not come back to be informed.
            self.members.remove(&agent);
        } else if let Some(host) = self.expected.remove(&agent) {
            self.gone(HostLoss { host, how });
        } else if self.members.contains_key(&agent) {
            self.lose(agent, how, LastSeen::Disconnected(self.now));
        }
    }

    /// Handles the broken connection of an agent. Its seat is kept, because the agent reconnects after a network
    /// failure or when a gateway has dropped the connection.
    pub(super) fn disconnected(&mut self, agent: AgentId, how: String, reset: bool) {
        let (now, limits) = (self.now, self.rules.limits);
        let Some(member) = self.members.get_mut(&agent).filter(|member| member.remote) else {
            return self.closed(agent, how);
        };
        let lost_at = member.last_message.saturating_add(limits.heartbeat_timeout());
        let until = if reset { lost_at.min(now + limits.reset()) } else { lost_at };
        let over = matches!(self.state, State::Over(_));
        if member.disconnection.is_some() || until <= now || over {
            return self.closed(agent, how);
        }
        let host = member.join.host.clone();
        if !reset {
            let seconds = (until - now).as_secs();
            self.say(format!(
                "the connection to {host} broke: {how}; its place is kept for {seconds} s"
            ));
        }
        if let Some(member) = self.members.get_mut(&agent) {
            member.disconnection = Some(Disconnection { until, how });
        }
        self.next_look = self.next_look.min(until);
    }

    /// Reports silent members to the user, and removes those that are silent for too long.
    pub(super) fn check_heartbeats(&mut self) {
        if self.now < self.next_look {
            return;
        }
        let (now, limits) = (self.now, self.rules.limits);
        let timeout = limits.heartbeat_timeout();
        let remote = self.members.iter_mut().filter(|(_, member)| member.remote);
        let (mut silent, mut lines) = (Vec::new(), Vec::new());
        let over = matches!(self.state, State::Over(_));
        for (id, member) in remote {
            if member.lost_at(timeout) <= now {
                silent.push(*id);
            } else if !member.quiet
                && member.disconnection.is_none()
                && member.last_message.saturating_add(limits.quiet()) <= now
            {
                member.quiet = true;
                lines.push(format!(
                    "no message from {} for {} s; after {} s it counts as lost",
                    member.join.host,
                    limits.quiet().as_secs_f64(),
                    timeout.as_secs_f64(),
                ));
            }
        }
        if over {
            // Those that are connected have been informed.
            self.members.retain(|id, _| !silent.contains(id));
        } else {
            lines.into_iter().for_each(|line| self.say(line));
            for id in silent {
                let Some(member) = self.members.get(&id) else { continue };
                let last_message = member.last_message;
                let how = match &member.disconnection {
                    Some(away) => format!("{}, and it did not come back", away.how),
                    None => format!("no message from it for {} s", timeout.as_secs_f64()),
                };
                self.lose(id, how, LastSeen::Silent(last_message));
            }
        }
        let watched = |member: &&Member| member.remote && (!over || member.disconnection.is_some());
        let next = self.members.values().filter(watched).map(|member| {
            let quiet = member.last_message.saturating_add(limits.quiet());
            let is_told = member.quiet || member.disconnection.is_some();
            if is_told { member.lost_at(timeout) } else { quiet.min(member.lost_at(timeout)) }
        });
        self.next_look = next.min().unwrap_or(Duration::MAX);
    }

    /// Removes a member that is lost or cannot be relied on.
    pub(super) fn lose(&mut self, agent: AgentId, how: String, last_seen: LastSeen) {
        let Some(member) = self.members.remove(&agent) else { return };
        if member.duplicate_of.is_some() {
            self.duplicates -= 1;
        }
        if !matches!(last_seen, LastSeen::Disconnected(_)) {
            self.actions.push(Action::Close(agent));
        }
        let loss = HostLoss { host: member.join.host, how };
        if member.activity != Activity::Idle {
            let (host, reason) = (loss.host.clone(), loss.how.clone());
            self.record(JobEvent::Leave { host, reason });
        }
        match member.activity {
            Activity::Idle => self.gone(loss),
            Activity::Running => {
                let reason = self.with_restart(format!("{} is lost: {}", loss.host, loss.how));
                self.failures.lose(agent, loss, last_seen);
                self.stop(Signal::SIGTERM as i32, reason);
            }
            Activity::Stopping { finished: false } => {
                self.say(format!("{} is lost: {}", loss.host, loss.how));
                self.failures.lose(agent, loss, last_seen);
            }
            // All ranks of the host have finished.
            Activity::Finished | Activity::Stopping { finished: true } => {}
        }
        self.hand_over_seat(agent);
    }

    /// Handles a host that leaves in an orderly way. Unfinished work of its ranks does not count as a failure.
    pub(super) fn leaves(&mut self, agent: AgentId) {
        let Some(member) = self.members.remove(&agent) else { return };
        if member.duplicate_of.is_some() {
            self.duplicates -= 1;
        }
        self.actions.push(Action::Close(agent));
        let host = member.join.host.clone();
        self.record(JobEvent::Leave { host, reason: "its launcher was stopped".into() });
        let line = format!("{} leaves", member.join.host);
        if member.activity == Activity::Running {
            self.stop_for_membership_change(line);
        } else {
            self.say(line);
        }
        self.hand_over_seat(agent);
    }

    /// Handles the loss of a host that had no part in the attempt.
    fn gone(&mut self, loss: HostLoss) {
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

    /// Returns the number of hosts for the next attempt.
    pub(super) fn present(&self) -> usize {
        self.count(|member| member.duplicate_of.is_none())
    }
}
