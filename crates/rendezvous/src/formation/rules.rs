//! Rules of a job: numbers of hosts and restarts, and time limits.

use std::time::Duration;

use crate::TimeLimits;

/// Settings of a job that the coordinator enforces.
///
/// ```
/// use brigade_rendezvous::Rules;
/// let rules = Rules { run_id: "night".into(), min_nodes: 1, max_nodes: 4, ..Rules::default() };
/// assert_eq!(rules.last_call.as_secs(), 5);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Name of the job. Agents of another job are refused.
    pub run_id: String,
    /// Minimum number of hosts.
    pub min_nodes: usize,
    /// Maximum number of hosts. Further hosts wait.
    pub max_nodes: usize,
    /// Maximum number of restarts after a failed rank or a lost host.
    pub max_restarts: u32,
    /// Time limit for `min_nodes` hosts to join.
    pub join_timeout: Duration,
    /// Time to wait for more hosts after `min_nodes` have joined, before the first attempt.
    pub last_call: Duration,
    /// Minimum time between two restarts for hosts that join. Doubled with each such restart that follows at once.
    pub join_interval: Duration,
    /// Time limits for silent connections, stopping and other phases.
    pub limits: TimeLimits,
    /// `true` if hosts may still join after the start, so that waiting for one is useful.
    pub late_hosts: bool,
    /// Name or address under which other hosts reach the coordinator's host, for agents on that host that give none.
    pub address: Option<String>,
    /// `true` if events are recorded: agents report each rank's start and end.
    pub recorded: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            run_id: String::new(),
            min_nodes: 1,
            max_nodes: 1,
            max_restarts: 0,
            join_timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(5),
            join_interval: Duration::from_secs(30),
            limits: TimeLimits::default(),
            late_hosts: true,
            address: None,
            recorded: false,
        }
    }
}

/// Maximum number of ranks per host. A larger number is a mistake, or the peer is not a Brigade agent.
pub(super) const MAX_RANKS_PER_HOST: usize = 1 << 16;
/// Time for which a new coordinator waits for the agents of the earlier one. It is longer than the pauses between their
/// attempts to connect.
pub(super) const REGROUP: Duration = Duration::from_millis(700);
