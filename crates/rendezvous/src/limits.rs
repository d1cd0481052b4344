//! Every time limit between launchers, agents and the coordinator, derived from two settings.

use std::time::Duration;

/// The time limits of a job, all of them derived from its heartbeat timeout and its shutdown
/// timeout, so that they nest: a waiting side waits longer than the answer may take.
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

/// 30 s each.
impl Default for TimeLimits {
    fn default() -> Self {
        Self::new(Duration::from_secs(30), Duration::from_secs(30))
    }
}

impl TimeLimits {
    /// The shortest heartbeat timeout: with a shorter one a busy host would be taken for lost.
    pub const SHORTEST_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);

    /// How long one address may take to accept a first connection: one that does not must not keep
    /// the agent from the next.
    pub(crate) const CONNECT: Duration = Duration::from_secs(3);
    /// How long the coordinator may take to answer the greeting over a first connection.
    pub(crate) const ANSWER: Duration = Duration::from_secs(5);
    /// How long a new connection may take to join before the coordinator closes it: the agent sends
    /// its request once the greeting is answered.
    pub(crate) const GREETING: Duration = Duration::from_secs(10);

    /// Limits for these two settings. A heartbeat timeout below 1 s or above a day is taken as that,
    /// a shutdown timeout above a year as a year.
    #[must_use]
    pub fn new(heartbeat_timeout: Duration, shutdown_timeout: Duration) -> Self {
        Self {
            heartbeat_timeout: heartbeat_timeout.clamp(Self::SHORTEST_HEARTBEAT_TIMEOUT, DAY),
            shutdown_timeout: shutdown_timeout.min(365 * DAY),
        }
    }

    /// A host of which nothing was heard for this long is lost; for as long, ranks run on without
    /// a connection to the coordinator.
    #[must_use]
    pub fn heartbeat_timeout(&self) -> Duration {
        self.heartbeat_timeout
    }

    /// How long ranks may take to stop after SIGTERM before they get SIGKILL.
    #[must_use]
    pub fn shutdown_timeout(&self) -> Duration {
        self.shutdown_timeout
    }

    /// How often a connection over which nothing else goes carries a beat: 15 times within the
    /// heartbeat timeout, but at least every 5 s and at most every 10 ms.
    #[must_use]
    pub fn heartbeat_interval(&self) -> Duration {
        (self.heartbeat_timeout / 15).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }

    /// After this long without a sign a connection is *quiet*: the user is told, and the agent tries
    /// to make a new connection beside it. Three beats have been missed by then.
    #[must_use]
    pub fn quiet(&self) -> Duration {
        (self.heartbeat_timeout / 5).max(self.heartbeat_interval() * 3)
    }

    /// How long each half of one attempt to connect again may take: the connection, and the greeting
    /// over it.
    #[must_use]
    pub fn reconnect_attempt(&self) -> Duration {
        (self.heartbeat_timeout / 15).clamp(Duration::from_millis(100), Duration::from_secs(2))
    }

    /// The pause between two attempts to connect again.
    #[must_use]
    pub fn reconnect_pause(&self) -> Duration {
        (self.heartbeat_timeout / 60).clamp(Duration::from_millis(10), Duration::from_millis(500))
    }

    /// How long an agent may take to come back after its connection was reset. A reset mostly means
    /// that its process has ended; a gateway on the way may have made it, too, and a living agent
    /// connects again at once.
    #[must_use]
    pub fn reset(&self) -> Duration {
        (self.heartbeat_timeout / 30).clamp(Duration::from_millis(50), Duration::from_secs(1))
    }

    /// `TCP_USER_TIMEOUT`: the kernel gives a connection up later than both sides would, so that
    /// they say why.
    #[must_use]
    pub fn kernel(&self) -> Duration {
        self.heartbeat_timeout * 3 / 2
    }

    /// `ServerAliveInterval` and `ServerAliveCountMax` of ssh: whole seconds, and their product
    /// is longer than the heartbeat timeout, for the same reason.
    #[must_use]
    pub fn ssh_keepalive(&self) -> (u64, u64) {
        let interval = self.heartbeat_interval().as_secs().max(1);
        let count = self.kernel().as_secs().div_ceil(interval).max(3);
        (interval, count)
    }

    /// How often a launcher tells a host, which waits for others to get ready, that it is alive.
    #[must_use]
    pub fn waiting_interval(&self) -> Duration {
        self.heartbeat_interval()
    }

    /// How long a rank may take to end after SIGKILL. One that takes longer sleeps in the kernel,
    /// in a driver or a file system that does not answer.
    #[must_use]
    pub fn stuck(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// How long what ranks have left behind may take to end after SIGKILL.
    #[must_use]
    pub fn leftovers(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// How long the output of stopped ranks may take to be shown before an agent answers without.
    #[must_use]
    pub fn output(&self) -> Duration {
        Duration::from_secs(3)
    }

    /// How long a rank that has written its error may take to end by itself, while the others are
    /// being stopped.
    #[must_use]
    pub fn exiting(&self) -> Duration {
        Duration::from_secs(3).min(self.shutdown_timeout)
    }

    /// How long an agent may take to answer [`ToAgent::Kill`](crate::ToAgent::Kill).
    #[must_use]
    pub fn kill(&self) -> Duration {
        self.stuck() + self.leftovers() + self.output() + TRANSFER
    }

    /// How long an agent may take to answer [`ToAgent::Stop`](crate::ToAgent::Stop).
    #[must_use]
    pub fn stop(&self) -> Duration {
        self.shutdown_timeout + self.kill()
    }

    /// How long the coordinator may take to tell all agents that the job is over: those that are
    /// cut off are waited for as long as they would wait.
    #[must_use]
    pub fn end_notice(&self) -> Duration {
        self.heartbeat_timeout + TRANSFER
    }
}

/// For messages on their way, and for a busy host.
const TRANSFER: Duration = Duration::from_secs(2);
const DAY: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever waits for something waits longer than it may take.
        #[test]
        fn limits_nest(
            heartbeat in prop_oneof![any::<u64>(), 0..100_000_u64],
            shutdown in prop_oneof![any::<u64>(), 0..100_000_u64],
        ) {
            let limits =
                TimeLimits::new(Duration::from_millis(heartbeat), Duration::from_millis(shutdown));
            let timeout = limits.heartbeat_timeout;
            prop_assert!(limits.heartbeat_interval() * 3 <= limits.quiet());
            // Two attempts, each with both halves.
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
