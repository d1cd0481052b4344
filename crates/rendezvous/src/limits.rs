//! Every time limit between launchers, agents and the coordinator, derived from two settings.

use std::time::Duration;

/// Time limits of a job. All are derived from its heartbeat timeout and its shutdown timeout so that they nest: a
/// waiting side waits longer than the answer may take.
///
/// ```
/// use std::time::Duration;
/// use brigade_rendezvous::TimeLimits;
///
/// let limits = TimeLimits::default();
/// assert_eq!(limits.heartbeat_timeout(), Duration::from_secs(30));
/// assert!(limits.heartbeat_interval() * 10 < limits.heartbeat_timeout());
/// assert!(limits.stop() > limits.shutdown_timeout() + limits.stuck());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLimits {
    heartbeat_timeout: Duration,
    shutdown_timeout: Duration,
}

/// Returns the limits for a heartbeat timeout and a shutdown timeout of 30 s each.
impl Default for TimeLimits {
    fn default() -> Self {
        Self::new(Duration::from_secs(30), Duration::from_secs(30))
    }
}

impl TimeLimits {
    /// Minimum heartbeat timeout. With a shorter one, a busy host would be considered lost.
    pub const SHORTEST_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);

    /// Time limit for one address to accept a first connection, so that an unresponsive address does not keep the agent
    /// from the next one.
    pub(crate) const CONNECT: Duration = Duration::from_secs(3);
    /// Time limit for the coordinator's answer to the greeting on a first connection.
    pub(crate) const ANSWER: Duration = Duration::from_secs(5);
    /// Time limit for a new connection to join before the coordinator closes it: the agent sends its request once the
    /// greeting is answered.
    pub(crate) const GREETING: Duration = Duration::from_secs(10);

    /// Derives the limits from the two settings. The heartbeat timeout is clamped to 1 s to a day, the shutdown timeout
    /// to at most a year.
    #[must_use]
    pub fn new(heartbeat_timeout: Duration, shutdown_timeout: Duration) -> Self {
        Self {
            heartbeat_timeout: heartbeat_timeout.clamp(Self::SHORTEST_HEARTBEAT_TIMEOUT, DAY),
            shutdown_timeout: shutdown_timeout.min(365 * DAY),
        }
    }

    /// Returns the time without received data after which a host is lost. For as long, ranks continue without a
    /// connection to the coordinator.
    #[must_use]
    pub fn heartbeat_timeout(&self) -> Duration {
        self.heartbeat_timeout
    }

    /// Returns the time that ranks may take to stop after SIGTERM before they get SIGKILL.
    #[must_use]
    pub fn shutdown_timeout(&self) -> Duration {
        self.shutdown_timeout
    }

    /// Returns the interval of heartbeats on an otherwise idle connection: a 15th of the heartbeat timeout, but at most
    /// 5 s and at least 10 ms.
    #[must_use]
    pub fn heartbeat_interval(&self) -> Duration {
        (self.heartbeat_timeout / 15).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }

    /// Returns the time without received data after which a connection is *quiet*: a line is shown to the user, and the
    /// agent attempts to make a second connection. Three heartbeats have been missed by then.
    #[must_use]
    pub fn quiet(&self) -> Duration {
        (self.heartbeat_timeout / 5).max(self.heartbeat_interval() * 3)
    }

    /// Returns the time limit of each half of one attempt to reconnect: the connection, and the handshake over it.
    #[must_use]
    pub fn reconnect_attempt(&self) -> Duration {
        (self.heartbeat_timeout / 15).clamp(Duration::from_millis(100), Duration::from_secs(2))
    }

    /// Returns the pause between two attempts to reconnect.
    #[must_use]
    pub fn reconnect_pause(&self) -> Duration {
        (self.heartbeat_timeout / 60).clamp(Duration::from_millis(10), Duration::from_millis(500))
    }

    /// Returns the time that an agent may take to reconnect after its connection was reset. A reset mostly means that
    /// its process has ended. A gateway on the way may also have caused it, and then the agent reconnects at once.
    #[must_use]
    pub fn reset(&self) -> Duration {
        (self.heartbeat_timeout / 30).clamp(Duration::from_millis(50), Duration::from_secs(1))
    }

    /// Returns the value of `TCP_USER_TIMEOUT`. The kernel drops a connection later than both sides would, so that
    /// their error messages give the reason.
    #[must_use]
    pub fn kernel(&self) -> Duration {
        self.heartbeat_timeout * 3 / 2
    }

    /// Returns `ServerAliveInterval` and `ServerAliveCountMax` of ssh: whole seconds and a count, whose product is
    /// longer than the heartbeat timeout, so that the error messages of both sides come first.
    #[must_use]
    pub fn ssh_keepalive(&self) -> (u64, u64) {
        let interval = self.heartbeat_interval().as_secs().max(1);
        let count = self.kernel().as_secs().div_ceil(interval).max(3);
        (interval, count)
    }

    /// Returns the interval at which a launcher sends a sign of life to a host that waits for others to get ready.
    #[must_use]
    pub fn waiting_interval(&self) -> Duration {
        self.heartbeat_interval()
    }

    /// Returns the time that a rank may take to end after SIGKILL. A rank that takes longer sleeps in the kernel, in a
    /// driver or a file system that does not answer.
    #[must_use]
    pub fn stuck(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// Returns the time that leftover processes of ranks may take to end after SIGKILL.
    #[must_use]
    pub fn leftovers(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Returns the time that the output of stopped ranks may take to be shown before an agent answers without it.
    #[must_use]
    pub fn output(&self) -> Duration {
        Duration::from_secs(3)
    }

    /// Returns the time that a rank that has written its error file may take to end by itself, while the others are
    /// being stopped.
    #[must_use]
    pub fn exiting(&self) -> Duration {
        Duration::from_secs(3).min(self.shutdown_timeout)
    }

    /// Returns the time that an agent may take to answer [`ToAgent::Kill`](crate::ToAgent::Kill).
    #[must_use]
    pub fn kill(&self) -> Duration {
        self.stuck() + self.leftovers() + self.output() + TRANSFER
    }

    /// Returns the time that an agent may take to answer [`ToAgent::Stop`](crate::ToAgent::Stop).
    #[must_use]
    pub fn stop(&self) -> Duration {
        self.shutdown_timeout + self.kill()
    }

    /// Returns the time that the coordinator may take to inform all agents that the job is over. It waits for
    /// disconnected agents as long as they would wait for the coordinator.
    #[must_use]
    pub fn end_notice(&self) -> Duration {
        self.heartbeat_timeout + TRANSFER
    }
}

/// Allowance for messages in transit and for a busy host.
const TRANSFER: Duration = Duration::from_secs(2);
const DAY: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Each limit is longer than the limits of the operations that it includes.
        #[test]
        fn limits_nest(
            heartbeat in prop_oneof![any::<u64>(), 0..100_000_u64],
            shutdown in prop_oneof![any::<u64>(), 0..100_000_u64],
        ) {
            let limits =
                TimeLimits::new(Duration::from_millis(heartbeat), Duration::from_millis(shutdown));
            let timeout = limits.heartbeat_timeout;
            prop_assert!(limits.heartbeat_interval() * 3 <= limits.quiet());
            // Two attempts to reconnect, each with both parts.
            let attempt = 2 * limits.reconnect_attempt() + limits.reconnect_pause();
            prop_assert!(limits.quiet() + 2 * attempt < timeout);
            prop_assert!(limits.reconnect_attempt() < TimeLimits::ANSWER);
            prop_assert!(TimeLimits::GREETING > TimeLimits::ANSWER);
            prop_assert!(limits.reconnect_pause() < limits.reconnect_attempt());
            prop_assert!(limits.reset() > limits.reconnect_pause());
            prop_assert!(limits.reset() < timeout);
            prop_assert!(limits.kernel() > timeout);
            let (interval, count) = limits.ssh_keepalive();
            prop_assert!(Duration::from_secs(interval * count) > timeout);
            prop_assert!(limits.waiting_interval() * 3 <= timeout);
            let agent_stops = limits.shutdown_timeout + limits.stuck() + limits.leftovers();
            prop_assert!(limits.stop() > agent_stops + limits.output());
            prop_assert!(limits.kill() > limits.stuck() + limits.leftovers() + limits.output());
            prop_assert!(limits.exiting() <= limits.shutdown_timeout);
            prop_assert!(limits.end_notice() > timeout);
        }
    }
}
