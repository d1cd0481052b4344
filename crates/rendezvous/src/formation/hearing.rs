//! What agents say, and what it means when they say nothing.

use std::time::Duration;

use super::member::{Member, Part};
use super::trouble::{self, Gone, Loss};
use super::{AgentId, Formation, State};
use crate::FromAgent;

impl Formation {
    /// It is alive.
    pub(super) fn heard(&mut self, agent: AgentId) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        member.heard = self.now;
        if self.rivals == 0 {
            return;
        }
        // So whoever came after its node rank in the meantime comes in vain.
        let vain = |(_, member): &(&AgentId, &Member)| {
            member.rival == Some(agent) && member.joined < self.now
        };
        let rivals: Vec<_> = self.members.iter().filter(vain).map(|(id, _)| *id).collect();
        for rival in rivals {
            let join = self.members[&rival].join.clone();
            let reason = self.taken(&join, agent);
            self.refuse(rival, &join.host, reason);
        }
    }

    pub(super) fn said(&mut self, agent: AgentId, message: FromAgent) {
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
            FromAgent::Stopped { attempt: of, port, killed } if Some(of) == attempt => {
                self.stopped(agent, port, killed);
            }
            FromAgent::Interrupted { signal } => {
                self.interrupt(trouble::checked(signal), Some(agent));
            }
            FromAgent::Leaving => self.leaves(agent),
            FromAgent::Unable { reason } => self.lose(agent, reason, Gone::Useless(self.now)),
            FromAgent::Join(_) => {
                self.lose(agent, "it joined twice".into(), Gone::Useless(self.now));
            }
            // Of an earlier attempt; or nothing to decide.
            FromAgent::Failed(_)
            | FromAgent::Finished { .. }
            | FromAgent::Stopped { .. }
            | FromAgent::Output { .. }
            | FromAgent::Say { .. } => {}
        }
    }

    pub(super) fn closed(&mut self, agent: AgentId, how: String) {
        if let Some(host) = self.expected.remove(&agent) {
            self.gone(Loss { host, how });
        } else if self.members.contains_key(&agent) {
            self.lose(agent, how, Gone::Now(self.now));
        }
    }

    pub(super) fn look_for_silent(&mut self) {
        if self.now < self.next_look {
            return;
        }
        let limit = self.rules.silence;
        let silent: Vec<_> = self
            .members
            .iter()
            .filter(|(_, member)| member.remote && member.heard.saturating_add(limit) <= self.now)
            .map(|(id, member)| (*id, member.heard))
            .collect();
        for (id, heard) in silent {
            let seconds = limit.as_secs_f64();
            self.lose(id, format!("nothing was heard of it for {seconds} s"), Gone::Since(heard));
        }
        let remote = self.members.values().filter(|member| member.remote);
        let next = remote.map(|member| member.heard.saturating_add(limit)).min();
        self.next_look = next.unwrap_or(Duration::MAX);
    }

    pub(super) fn look_for_stuck(&mut self) {
        let State::Stopping(until) = self.state else { return };
        if self.now < until {
            return;
        }
        let stuck = |member: &Member| matches!(member.part, Part::Stopping { .. });
        let ids = self.members.iter().filter(|(_, member)| stuck(member)).map(|(id, _)| *id);
        for id in ids.collect::<Vec<_>>() {
            self.lose(id, "it did not stop its ranks".into(), Gone::Useless(self.now));
        }
    }
}
