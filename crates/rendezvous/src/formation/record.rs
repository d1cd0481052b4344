//! Recording of a job's events.

use std::time::Duration;

use super::job_event::parts;
use super::{Action, AgentId, CauseKind, Formation, JobCause, JobEvent, Record};
use crate::{Cause, ExitStatus, Millis};

impl Formation {
    /// Records an event, if events are recorded.
    pub(super) fn record(&mut self, event: JobEvent) {
        self.record_at(self.now, event);
    }

    fn record_at(&mut self, at: Duration, event: JobEvent) {
        if self.rules.recorded {
            self.actions.push(Action::Record(Record { at, event }));
        }
    }

    pub(super) fn record_cause(&mut self, cause: &Cause) {
        let cause = JobCause::of(self.attempt, cause);
        self.record(JobEvent::Cause(Box::new(cause)));
    }

    /// Records that the attempt was stopped for another one with other hosts.
    pub(super) fn record_change(&mut self) {
        let reason = self.last_stop.as_ref().map(|(_, reason)| reason.clone());
        self.record(JobEvent::Cause(Box::new(JobCause {
            attempt: self.attempt,
            cause: CauseKind::HostsChanged,
            message: reason.unwrap_or_default(),
            ..JobCause::default()
        })));
    }

    /// Records the start of a host's ranks. An agent that reconnects reports it again.
    pub(super) fn ranks_started(&mut self, agent: AgentId, pids: Vec<i32>, at: Millis) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        let Some(part) = member.assignment.clone() else { return };
        if !member.ranks.is_empty() || pids.len() != part.nproc {
            return;
        }
        member.ranks = pids.iter().map(|pid| Some(*pid)).collect();
        let (host, at) = (member.join.host.clone(), member.clock.here(at, self.now));
        for (local_rank, pid) in pids.into_iter().enumerate() {
            let (rank, attempt) = (part.first_rank + local_rank, part.attempt);
            let host = host.clone();
            self.record_at(at, JobEvent::Start { attempt, rank, local_rank, host, pid });
        }
    }

    /// Records the end of a rank, once.
    pub(super) fn rank_exited(
        &mut self,
        agent: AgentId,
        local_rank: usize,
        exit_status: ExitStatus,
        at: Millis,
    ) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        let Some((attempt, first_rank)) =
            member.assignment.as_ref().map(|part| (part.attempt, part.first_rank))
        else {
            return;
        };
        let Some(pid) = member.ranks.get_mut(local_rank).and_then(Option::take) else { return };
        let (host, at) = (member.join.host.clone(), member.clock.here(at, self.now));
        let (rank, (code, signal)) = (first_rank + local_rank, parts(exit_status));
        let exit = JobEvent::Exit { attempt, rank, local_rank, host, pid, code, signal };
        self.record_at(at, exit);
    }
}
