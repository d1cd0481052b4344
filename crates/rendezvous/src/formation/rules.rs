//! The rules of a job: how many hosts, how many restarts, how long one waits.

use std::time::Duration;

use crate::TimeLimits;

/// What the coordinator holds the agents to.
///
/// ```
/// use brigade_rendezvous::Rules;
/// let rules = Rules { run_id: "night".into(), min_nodes: 1, max_nodes: 4, ..Rules::default() };
/// assert_eq!(rules.last_call.as_secs(), 5);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Name of the job; agents of another one are refused.
    pub run_id: String,
    /// The job runs with no fewer hosts.
    pub min_nodes: usize,
    /// The job runs with no more hosts; those that come on top wait.
    pub max_nodes: usize,
    /// How often the job may start again after a failed rank or a lost host.
    pub max_restarts: u32,
    /// How long to wait for `min_nodes`.
    pub join_timeout: Duration,
    /// How long to wait for more hosts once `min_nodes` are there, before the first attempt.
    pub last_call: Duration,
    /// How long the others run at least between two restarts for hosts that join; doubled with each
    /// such restart that follows at once.
    pub join_interval: Duration,
    /// How long silence, stopping and whatever else may take.
    pub limits: TimeLimits,
    /// Hosts may still come after the start, so that it makes sense to wait for one.
    pub late_hosts: bool,
    /// Name or address under which other hosts reach the coordinator's own, for agents there that
    /// name none.
    pub address: Option<String>,
    /// What happens is to be written down: agents tell of each rank's start and end.
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

/// No host starts more ranks: a larger number is a mistake, or a peer that is not ours.
pub(super) const MAX_RANKS_PER_HOST: usize = 1 << 16;
/// How long a new coordinator waits for the agents that the old one has left behind. Longer than
/// the pauses with which they look for it.
pub(super) const REGROUP: Duration = Duration::from_millis(700);
