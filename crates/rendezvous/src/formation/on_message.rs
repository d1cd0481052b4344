//! What agents say, and what it means when they say nothing.

use std::time::Duration;

use super::failures::{self, Gone, Loss};
use super::member::{Away, Member, Part};
use super::{AgentId, Formation, State};
use crate::FromAgent;

impl Formation {
    /// It is alive.
    pub(super) fn heard(&mut self, agent: AgentId) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        member.heard = self.now;
        if std::mem::take(&mut member.quiet) {
            let line = format!("{} is heard again", member.join.host);
            self.say(line);
        }
        if self.duplicates == 0 || matches!(self.state, State::Over(_)) {
            return;
        }
        // So a host that asked for its node rank in the meantime is refused.
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

    pub(super) fn said(&mut self, agent: AgentId, message: FromAgent) {
        if matches!(self.state, State::Over(_)) {
            return;
        }
        let Some(member) = self.members.get_mut(&agent) else { return };
        let attempt = self.attempt;
        match message {
            FromAgent::Beat { sent } => {
                member.clock.compare(self.now, sent);
                self.trouble.set_clock(agent, member.clock);
            }
            FromAgent::Failed(failure)
                if Some(failure.attempt) == attempt && member.takes_part() =>
            {
                self.failed(agent, failure);
            }
            FromAgent::Finished { attempt: of } if Some(of) == attempt => match &mut member.part {
                part @ Part::Running => *part = Part::Finished,
                Part::Stopping { finished } => *finished = true,
                Part::Idle | Part::Finished => {}
            },
            FromAgent::Stopped { attempt: of, port, killed, stuck } if Some(of) == attempt => {
                self.stopped(agent, port, killed, stuck);
            }
            FromAgent::Interrupted { signal, count } => {
                // Else it is one of before, sent again after a break.
                if count > member.requests {
                    member.requests = count;
                    self.interrupt(failures::checked(signal), Some(agent));
                }
            }
            FromAgent::Leaving => self.leaves(agent),
            FromAgent::Unable { reason } => self.lose(agent, reason, Gone::Useless(self.now)),
            FromAgent::Join(_) => {
                self.lose(agent, "it joined twice".into(), Gone::Useless(self.now));
            }
            FromAgent::Started { attempt: of, pids, at } if Some(of) == attempt => {
                self.ranks_started(agent, pids, at);
            }
            FromAgent::Exited { attempt: of, local_rank, ending, at } if Some(of) == attempt => {
                self.rank_exited(agent, local_rank, ending, at);
            }
            // Of an earlier attempt; or nothing to decide.
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

    pub(super) fn closed(&mut self, agent: AgentId, how: String) {
        if matches!(self.state, State::Over(_)) {
            // It has been told, or will not come back to hear of it.
            self.members.remove(&agent);
        } else if let Some(host) = self.expected.remove(&agent) {
            self.gone(Loss { host, how });
        } else if self.members.contains_key(&agent) {
            self.lose(agent, how, Gone::Now(self.now));
        }
    }

    /// The connection to an agent broke. Its seat is kept: a cut is mended, or a gateway has
    /// forgotten the connection, and the agent comes back.
    pub(super) fn disconnected(&mut self, agent: AgentId, how: String, reset: bool) {
        let (now, limits) = (self.now, self.rules.limits);
        let Some(member) = self.members.get_mut(&agent).filter(|member| member.remote) else {
            return self.closed(agent, how);
        };
        let lost_at = member.heard.saturating_add(limits.heartbeat_timeout());
        let until = if reset { lost_at.min(now + limits.reset()) } else { lost_at };
        let over = matches!(self.state, State::Over(_));
        if member.away.is_some() || until <= now || over {
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
            member.away = Some(Away { until, how });
        }
        self.next_look = self.next_look.min(until);
    }

    /// Tells the user of members that are silent, and takes out those that are for too long.
    pub(super) fn look_for_silent(&mut self) {
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
                && member.away.is_none()
                && member.heard.saturating_add(limits.quiet()) <= now
            {
                member.quiet = true;
                lines.push(format!(
                    "nothing was heard of {} for {} s; it is lost after {} s",
                    member.join.host,
                    limits.quiet().as_secs_f64(),
                    timeout.as_secs_f64(),
                ));
            }
        }
        if over {
            // Those that are connected have been told.
            self.members.retain(|id, _| !silent.contains(id));
        } else {
            lines.into_iter().for_each(|line| self.say(line));
            for id in silent {
                let Some(member) = self.members.get(&id) else { continue };
                let heard = member.heard;
                let how = match &member.away {
                    Some(away) => format!("{}, and it did not come back", away.how),
                    None => format!("nothing was heard of it for {} s", timeout.as_secs_f64()),
                };
                self.lose(id, how, Gone::Since(heard));
            }
        }
        let watched = |member: &&Member| member.remote && (!over || member.away.is_some());
        let next = self.members.values().filter(watched).map(|member| {
            let quiet = member.heard.saturating_add(limits.quiet());
            let is_told = member.quiet || member.away.is_some();
            if is_told { member.lost_at(timeout) } else { quiet.min(member.lost_at(timeout)) }
        });
        self.next_look = next.min().unwrap_or(Duration::MAX);
    }

    /// It is to stop, and is given up where it does not in time. One that is away is waited for as
    /// long as its seat is kept, but not by a user who waits.
    pub(super) fn may_be_stuck(&self, member: &Member) -> bool {
        let is_waited_for = member.away.is_some() && !self.trouble.killed;
        matches!(member.part, Part::Stopping { .. }) && !is_waited_for
    }

    pub(super) fn look_for_stuck(&mut self) {
        let State::Stopping(until) = self.state else { return };
        if self.now < until {
            return;
        }
        let stuck = self.members.iter().filter(|(_, member)| self.may_be_stuck(member));
        let ids = stuck.map(|(id, _)| *id);
        for id in ids.collect::<Vec<_>>() {
            self.lose(id, "it did not stop its ranks".into(), Gone::Useless(self.now));
        }
    }
}
