//! State of an agent in the coordinator's state machine.

use std::time::Duration;

use super::AgentId;
use crate::{Assignment, Join, Millis};

/// Agent that has joined.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) join: Join,
    pub(super) seen: Option<String>,
    pub(super) remote: bool,
    /// Position of the member in the order of joining.
    pub(super) order: u64,
    pub(super) joined: Duration,
    /// `true` if the member took part in the last attempt, so that its place is kept.
    pub(super) previous_member: bool,
    /// Other member that has requested the same node rank. It may have ended.
    pub(super) duplicate_of: Option<AgentId>,
    pub(super) activity: Activity,
    /// Assignment of the member in the last attempt that it was asked to start.
    pub(super) assignment: Option<Assignment>,
    /// Process numbers of its ranks in that attempt, once they are reported. `None` for a rank that has ended.
    pub(super) ranks: Vec<Option<i32>>,
    /// Number of the member's last request to stop the job, in its own count.
    pub(super) requests: u32,
    /// Number of the member's last request for its seat, in its own count.
    pub(super) resumes: u32,
    /// Reason why it can take part in no other attempt.
    pub(super) stuck: Option<String>,
    /// Details of the disconnection, while the member has no connection.
    pub(super) disconnection: Option<Disconnection>,
    /// `true` if the agent has been silent for so long that the user was informed.
    pub(super) quiet: bool,
    pub(super) last_message: Duration,
    pub(super) clock: Clock,
}

/// Broken connection of an agent whose seat is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disconnection {
    /// Time until which the seat is kept.
    pub(super) until: Duration,
    /// Description of how the connection was lost.
    pub(super) how: String,
}

/// Activity of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activity {
    /// The agent has no processes.
    Idle,
    /// The agent was ordered to start ranks.
    Running,
    /// All ranks of the agent have ended with exit code 0.
    Finished,
    /// The agent was ordered to stop its ranks and has not answered.
    Stopping { finished: bool },
}

impl Member {
    pub(super) fn takes_part(&self) -> bool {
        self.activity != Activity::Idle
    }

    /// Returns the time at which the host is considered lost, if no data is received from it until then.
    pub(super) fn lost_at(&self, heartbeat_timeout: Duration) -> Duration {
        match &self.disconnection {
            Some(away) => away.until,
            None => self.last_message.saturating_add(heartbeat_timeout),
        }
    }

    /// Returns the sort key of the member: requested node ranks come first, then the order of joining.
    pub(super) fn place(&self) -> (usize, u64) {
        (self.join.node_rank.unwrap_or(usize::MAX), self.order)
    }
}

/// Estimate of an agent's clock offset from the coordinator's clock: the smallest difference between the times of
/// sending and receiving a message, which is the offset plus the shortest transit time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clock {
    ahead: Option<i64>,
}

impl Clock {
    pub(super) fn compare(&mut self, now: Duration, sent: Millis) {
        let ahead = signed(now.as_millis()).saturating_sub(signed(sent.into()));
        self.ahead = Some(self.ahead.map_or(ahead, |least| least.min(ahead)));
    }

    /// Returns a moment of the agent's clock on the coordinator's clock.
    pub(super) fn ours(self, at: Millis) -> i64 {
        signed(at.into()).saturating_add(self.ahead.unwrap_or(0))
    }

    /// Returns a moment of the agent's clock on the coordinator's clock, no later than now.
    pub(super) fn here(self, at: Millis, now: Duration) -> Duration {
        Duration::from_millis(u64::try_from(self.ours(at)).unwrap_or(0)).min(now)
    }
}

/// Converts to a signed number. Values beyond 292 million years are clamped.
pub(super) fn signed(millis: u128) -> i64 {
    i64::try_from(millis).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_differ_are_compared() {
        let mut clock = Clock::default();
        // The agent's clock is 5 s behind; messages take 40, 2 and 300 ms.
        for (sent, took) in [(1_000, 40), (2_000, 2), (3_000, 300)] {
            clock.compare(Duration::from_millis(sent + 5_000 + took), sent);
        }
        assert_eq!(clock.ours(2_500), 7_502);
    }

    #[test]
    fn no_time_is_too_large() {
        let mut clock = Clock::default();
        clock.compare(Duration::MAX, 0);
        assert_eq!(clock.ours(u64::MAX), i64::MAX);
        clock.compare(Duration::ZERO, u64::MAX);
        clock.compare(Duration::ZERO, u64::MAX);
        let _ = clock.ours(0);
    }
}
