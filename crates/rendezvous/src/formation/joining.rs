//! Which hosts may take part, and what a new one changes.

use super::admission::JOINED_LATELY;
use super::failures::{Gone, Loss};
use super::member::{Clock, Member, Part};
use super::rules::MAX_RANKS_PER_HOST;
use super::{Action, AgentId, Formation, JobEvent, State, hosts};
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
            // Its first request was lost on its way: it has had no part, and is new here.
            (1.., None) if join.last_attempt.is_none() => {}
            (1.., _) => return self.resumes(agent, &join),
            // That first request, which was only slow.
            (0, Some(seat)) if self.members[&seat].resumes > 0 => {
                return self.actions.push(Action::Close(agent));
            }
            (0, _) => {}
        }
        if self.expected.remove(&agent).is_none() {
            self.announced += 1;
        }
        if self.members.contains_key(&agent) {
            return self.lose(agent, "it joined twice".into(), Gone::Useless(self.now));
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
            part: Part::Idle,
            assignment: None,
            ranks: Vec::new(),
            requests: 0,
            stuck: None,
            away: None,
            quiet: false,
            heard: self.now,
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

    /// An agent that has lost its connection, or has found it silent, comes over a new one.
    ///
    /// What was on its way to it may be lost, so that it is told again; it does the same. Both sides
    /// take no notice of what they know.
    fn resumes(&mut self, connection: AgentId, join: &Join) {
        if let Some(reason) = self.foreign(join) {
            return self.refuse(connection, &join.host, reason);
        }
        let attempt = self.attempt;
        let seat = self.seat_of(join).filter(|_| join.last_attempt <= attempt);
        let Some((id, member)) = seat.and_then(|id| Some((id, self.members.get_mut(&id)?))) else {
            let reason =
                format!("{} (pid {}) has no seat here: it was taken for lost", join.host, join.pid);
            return self.refuse(connection, &join.host, reason);
        };
        if join.resume <= member.resumes {
            // It was late, and another connection came before it.
            self.actions.push(Action::Close(connection));
            return;
        }
        member.resumes = join.resume;
        let was_told = member.away.take().is_some() | std::mem::take(&mut member.quiet);
        member.heard = self.now;
        member.clock.compare(self.now, join.sent);
        let (part, port) = (member.part, join.port);
        let quiet = self.now.saturating_add(self.rules.limits.quiet());
        self.next_look = self.next_look.min(quiet);
        if part == Part::Idle {
            member.join.port = port;
        }
        let start = member.assignment.clone().filter(|_| join.last_attempt != attempt);
        self.actions.push(Action::Adopt { agent: id, connection });
        if was_told && !matches!(self.state, State::Over(_)) {
            self.say(format!("{} is connected again", join.host));
        }
        self.send(id, ToAgent::Resumed);
        match (&self.state, part) {
            (State::Over(verdict), _) => {
                let verdict = verdict.clone();
                self.members.remove(&id);
                self.send(id, ToAgent::End(verdict));
                self.actions.push(Action::Close(id));
            }
            (State::Running, Part::Running) => {
                if let Some(start) = start {
                    self.send(id, ToAgent::Start(start));
                }
            }
            // It has not even heard of the attempt that is being stopped.
            (State::Stopping(_), Part::Stopping { .. }) if start.is_some() => {
                self.stopped(id, port, false, None);
            }
            (State::Stopping(_), Part::Stopping { .. }) => self.stop_again(id),
            _ => {}
        }
    }

    /// The member that this agent is already.
    fn seat_of(&self, join: &Join) -> Option<AgentId> {
        let is_it = |member: &Member| {
            member.remote && !join.agent.is_empty() && member.join.agent == join.agent
        };
        self.members.iter().find(|(_, member)| is_it(member)).map(|(id, _)| *id)
    }

    /// Why this agent does not belong here.
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

    /// Why this agent cannot take part, whatever the others do.
    fn refusal(&self, join: &Join) -> Option<String> {
        let foreign = self.foreign(join);
        if foreign.is_some() {
            return foreign;
        }
        let host = &join.host;
        if let State::Over(verdict) = &self.state {
            return Some(format!("the job is over (exit code {})", verdict.code));
        }
        if self.ending() {
            return Some("the job is ending".into());
        }
        if let Some(wanted) = join.node_rank
            && wanted >= self.rules.max_nodes
        {
            return Some(format!(
                "{host} has node rank {wanted}, but with {} the highest is {}",
                hosts(self.rules.max_nodes),
                self.rules.max_nodes - 1,
            ));
        }
        if join.nproc == 0 || join.nproc > MAX_RANKS_PER_HOST {
            return Some(format!(
                "{host} would start {} ranks; a host starts 1 to {MAX_RANKS_PER_HOST}",
                join.nproc,
            ));
        }
        // Numbers go up from there, and none is used twice.
        (join.last_attempt.is_some_and(|last| last > u32::MAX / 2)).then(|| {
            format!("{host} cannot have seen attempt {}", join.last_attempt.unwrap_or_default())
        })
    }

    pub(super) fn taken(&self, join: &Join, duplicate_of: AgentId) -> String {
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

    pub(super) fn refuse(&mut self, agent: AgentId, host: &str, reason: String) {
        if self.members.remove(&agent).is_some_and(|member| member.duplicate_of.is_some()) {
            self.duplicates -= 1;
        }
        if let State::Gathering(gathering) = &mut self.state {
            let how = format!("it was refused: {reason}");
            gathering.loss = Some(Loss { host: host.into(), how });
        }
        self.say(format!("refused {host}: {reason}"));
        self.send(agent, ToAgent::Refused { reason });
        self.actions.push(Action::Close(agent));
    }

    /// A host is there on which the job can count.
    pub(super) fn arrived(&mut self, agent: AgentId) {
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
                    self.calm_stop(format!("{host} joins"));
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

    /// The node rank of a lost host goes to the first one that waits for it.
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
}
