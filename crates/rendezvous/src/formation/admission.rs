//! Backoff between restarts for hosts that join a running job.

use std::time::Duration;

use super::member::{Activity, Member};
use super::{AgentId, Formation, State};

/// Limits how often joining hosts may restart the others, because such a restart costs work and does not count against
/// `max_restarts`.
///
/// The first host that joins a running job is admitted at once. After that an attempt runs for at least
/// [`Rules::join_interval`](super::Rules::join_interval) before hosts are admitted again, twice as long each time, up
/// to [`LONGEST`]. Once twice the interval has passed without such a restart, the shortest interval applies again.
/// Waiting hosts are admitted together, and also at any restart after a failure, which `max_restarts` limits.
///
/// A host that leaves stops the attempt regardless of the interval, since its ranks are missing; but it must have been
/// admitted before it can leave.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// Start of the last attempt with hosts that joined a running job, and the time after it in which no host is
    /// admitted.
    last: Option<(Duration, Duration)>,
    /// `true` if the attempt was stopped for hosts that join, so that the next attempt includes them.
    open: bool,
    /// Time at which waiting hosts are admitted to the running attempt.
    pub(super) due: Option<Duration>,
}

impl Admission {
    /// Returns the time from which joining hosts may restart the others.
    fn earliest(&self) -> Duration {
        match self.last {
            Some((at, interval)) if !self.open => at.saturating_add(interval),
            _ => Duration::ZERO,
        }
    }

    fn record(&mut self, now: Duration, shortest: Duration) {
        let interval = match self.last {
            Some((at, interval)) if now < at.saturating_add(interval.saturating_mul(2)) => {
                interval.saturating_mul(2).min(LONGEST.max(shortest))
            }
            _ => shortest,
        };
        self.last = Some((now, interval));
    }
}

impl Member {
    /// Returns `true` if the host was not in the previous attempt, under this coordinator or the one before it, so that
    /// it has to be admitted.
    pub(super) fn is_new(&self) -> bool {
        !self.previous_member && self.join.last_attempt.is_none()
    }
}

impl Formation {
    /// Returns the time that hosts outside of the present attempt have to wait until they may restart it.
    pub(super) fn admission_wait(&self) -> Duration {
        self.admission.earliest().saturating_sub(self.now)
    }

    /// Stops the attempt for hosts that join it.
    pub(super) fn admit(&mut self, reason: String) {
        self.admission.open = true;
        self.stop_for_membership_change(reason);
    }

    /// Records the start of an attempt. `newcomers` is `true` if it has hosts that were not in the previous one,
    /// although that one had not failed.
    pub(super) fn admitted(&mut self, newcomers: bool) {
        if newcomers || self.admission.open {
            self.admission.record(self.now, self.rules.join_interval);
        }
        self.admission.open = false;
    }

    /// Returns `true` if hosts could take part in another attempt, and the present one has room for them.
    pub(super) fn has_room(&self) -> bool {
        matches!(self.state, State::Running)
            && self.count(Member::takes_part) < self.rules.max_nodes
            && self.count(|member| member.activity == Activity::Finished) == 0
    }

    /// Returns the host for which the running attempt is stopped once [`Formation::admission_wait`] is over.
    fn next_admitted(&self) -> Option<AgentId> {
        if !self.has_room() {
            return None;
        }
        let waits = |member: &Member| {
            !member.takes_part() && member.duplicate_of.is_none() && member.disconnection.is_none()
        };
        let mut members = self.members.iter().filter(|(_, member)| waits(member));
        members.next().map(|(id, _)| *id)
    }

    /// Sets the time at which waiting hosts are admitted to the running attempt.
    pub(super) fn plan_admission(&mut self) {
        self.admission.due = self.next_admitted().map(|_| self.admission.earliest());
    }

    /// Admits the hosts that have waited for long enough.
    pub(super) fn admit_waiting(&mut self) {
        if !self.admission_wait().is_zero() {
            return;
        }
        let Some(id) = self.next_admitted() else { return };
        let reason = format!("{} joins", self.members[&id].join.host);
        self.admit(reason);
    }
}

/// Maximum time that a host waits for a job with room.
const LONGEST: Duration = Duration::from_secs(600);

/// Reason why a host has to wait, for messages.
pub(super) const JOINED_LATELY: &str = "a host has joined a running attempt shortly before";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_rises_and_falls() {
        let seconds = Duration::from_secs;
        let mut admission = Admission::default();
        assert_eq!(admission.earliest(), seconds(0), "the first one is free");
        let mut intervals = Vec::new();
        let mut now = seconds(7);
        for _ in 0..7 {
            admission.record(now, seconds(30));
            intervals.push((admission.earliest() - now).as_secs());
            now = admission.earliest();
        }
        assert_eq!(intervals, [30, 60, 120, 240, 480, 600, 600]);
        now += seconds(600);
        admission.record(now, seconds(30));
        assert_eq!(admission.earliest(), now + seconds(30));
        // Without an interval nothing is delayed.
        let mut admission = Admission::default();
        for _ in 0..3 {
            admission.record(now, seconds(0));
            assert_eq!(admission.earliest(), now);
        }
    }
}
