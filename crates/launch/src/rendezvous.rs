//! Options of the rendezvous: the hosts that take part in a job, and the place where they meet.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::LaunchError;

/// Number of hosts that may take part in a job: a minimum and a maximum.
///
/// ```
/// use brigade_launch::NodeRange;
/// let range: NodeRange = "2:4".parse()?;
/// assert_eq!((range.min, range.max), (2, 4));
/// assert_eq!("3".parse::<NodeRange>()?.to_string(), "3");
/// assert!("4:2".parse::<NodeRange>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRange {
    /// Minimum number of hosts. With fewer, the job waits.
    pub min: usize,
    /// Maximum number of hosts. With as many, the job does not wait for more.
    pub max: usize,
}

/// Rendezvous mode: how the agents of several hosts meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RendezvousMode {
    /// The job has only one host.
    OneHost,
    /// A launcher has connected the hosts and holds a connection to each ([`hosts::run`](crate::hosts::run)).
    Launcher {
        /// Number of this host, from 0.
        node_rank: usize,
    },
    /// The hosts are numbered. Host 0 listens and the others connect (`--node-rank`, `--master-addr`, `--master-port`).
    Static {
        /// Number of this host, from 0.
        node_rank: usize,
        /// Name or address of host 0. Host 0 itself only passes it on.
        master_addr: String,
        /// Port at which host 0 listens.
        master_port: u16,
    },
    /// The host that the endpoint names listens, and hosts may join and leave (`--rdzv-endpoint`).
    Elastic {
        /// Endpoint at which the hosts meet.
        endpoint: Endpoint,
        /// `true` if this host listens. By default it does when the endpoint is an address of this host and no process
        /// of this host listens there yet.
        serve: Option<bool>,
    },
    /// The hosts find each other through etcd (`--rdzv-backend etcd`). Any of them may be lost, the coordinator's host
    /// included.
    Etcd {
        /// Servers of one etcd cluster, tried in order.
        endpoints: Vec<Endpoint>,
    },
}

/// Network endpoint: `HOST:PORT` or `[IPV6]:PORT`. Without a port, it has torchrun's for elastic jobs.
///
/// ```
/// use brigade_launch::Endpoint;
/// let endpoint: Endpoint = "node1:1234".parse()?;
/// assert_eq!((endpoint.host.as_str(), endpoint.port), ("node1", 1234));
/// assert_eq!("[::1]".parse::<Endpoint>()?.to_string(), "[::1]:29400");
/// assert!("node1:http".parse::<Endpoint>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Name or address, an IPv6 address without its brackets.
    pub host: String,
    /// TCP port of the endpoint.
    pub port: u16,
}

/// Time limits of the agents' rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousTimeouts {
    /// Time limit for enough hosts to join (`--rdzv-conf join_timeout=`, `timeout=`). Defaults to 600 s.
    pub join: Duration,
    /// Time to wait for further hosts, once there are enough and fewer than the maximum (`--rdzv-conf
    /// last_call_timeout=`). Defaults to 3 s.
    pub last_call: Duration,
    /// Minimum time between two restarts for hosts that join a running job (`--rdzv-conf join_interval=`). Doubled
    /// while such restarts follow each other. Defaults to 30 s.
    pub join_interval: Duration,
}

impl RendezvousMode {
    /// Checks the settings of a job's hosts before any of them is contacted.
    pub(crate) fn check(&self, nodes: NodeRange) -> Result<(), LaunchError> {
        let refuse = |reason: String| Err(LaunchError::Rendezvous { reason });
        if nodes.min == 0 || nodes.min > nodes.max {
            return refuse(format!("--nnodes {}:{} is not a range of hosts", nodes.min, nodes.max));
        }
        match self {
            Self::OneHost if nodes.max > 1 => refuse(format!(
                "--nnodes {nodes} needs a place where the hosts meet: give each host --node-rank, \
                 --master-addr and --master-port, or all of them --rdzv-endpoint HOST:PORT"
            )),
            Self::Static { .. } if nodes.min != nodes.max => refuse(format!(
                "--nnodes {nodes} is a range, which needs --rdzv-endpoint HOST:PORT: with --node-rank \
                 the number of hosts is fixed"
            )),
            Self::Static { node_rank, .. } if *node_rank >= nodes.max => refuse(format!(
                "--node-rank {node_rank} is not below --nnodes {nodes}: the first host has number 0"
            )),
            Self::Static { master_addr, .. } if master_addr.is_empty() => {
                refuse("--master-addr is empty: give the name or address of host 0".to_owned())
            }
            Self::Static { master_port: 0, .. } => {
                refuse("--master-port 0 is not possible: all hosts must know the port".to_owned())
            }
            Self::Etcd { endpoints } if endpoints.is_empty() => {
                refuse("etcd needs --rdzv-endpoint HOST:PORT[,HOST:PORT...]".to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// Returns the default: one host.
impl Default for NodeRange {
    fn default() -> Self {
        Self { min: 1, max: 1 }
    }
}

/// Returns the defaults: ten minutes, as in torchrun, three seconds for latecomers at the first start, and half a
/// minute between restarts for joining hosts.
impl Default for RendezvousTimeouts {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(600),
            last_call: Duration::from_secs(3),
            join_interval: Duration::from_secs(30),
        }
    }
}

/// Parses `N` or `MIN:MAX`.
impl FromStr for NodeRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|n| *n > 0);
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        match (number(min), number(max)) {
            (Some(min), Some(max)) if min <= max => Ok(Self { min, max }),
            (Some(min), Some(max)) => Err(format!("{min} is more than {max}: MIN:MAX is expected")),
            _ => Err("a number of hosts, N or MIN:MAX, is expected".to_owned()),
        }
    }
}

impl fmt::Display for NodeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max {
            write!(f, "{}", self.min)
        } else {
            write!(f, "{}:{}", self.min, self.max)
        }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text:?} is not HOST:PORT or [IPV6]:PORT");
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or_else(expected)?;
                let port = if after.is_empty() { None } else { Some(after) };
                (host, port.map(|p| p.strip_prefix(':').ok_or_else(expected)).transpose()?)
            }
            // An IPv6 address without brackets has no port.
            None if text.matches(':').count() > 1 => (text, None),
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = match port.map(str::parse::<u16>) {
            None => ELASTIC_PORT,
            Some(Ok(port)) if port > 0 => port,
            Some(_) => return Err(expected()),
        };
        if host.is_empty() || host.contains(char::is_whitespace) {
            return Err(expected());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Default port of torchrun for elastic jobs.
const ELASTIC_PORT: u16 = 29_400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_cannot_meet() {
        let at = |node_rank, master_addr: &str, master_port| RendezvousMode::Static {
            node_rank,
            master_addr: master_addr.to_owned(),
            master_port,
        };
        let endpoint: Endpoint = "node1".parse().unwrap();
        let elastic = || RendezvousMode::Elastic { endpoint: endpoint.clone(), serve: None };
        let table = [
            ("1", RendezvousMode::OneHost, None),
            ("2", RendezvousMode::OneHost, Some("--nnodes 2 needs a place where the hosts meet")),
            ("1:2", RendezvousMode::OneHost, Some("--nnodes 1:2 needs a place")),
            ("2", at(1, "a", 1), None),
            ("1", at(0, "a", 1), None),
            ("2", at(2, "a", 1), Some("--node-rank 2 is not below --nnodes 2")),
            ("1:2", at(0, "a", 1), Some("--nnodes 1:2 is a range, which needs --rdzv-endpoint")),
            ("2", at(0, "", 1), Some("--master-addr is empty")),
            ("2", at(0, "a", 0), Some("--master-port 0 is not possible")),
            ("1:4", elastic(), None),
            ("2", RendezvousMode::Etcd { endpoints: vec![] }, Some("etcd needs --rdzv-endpoint")),
            ("2", RendezvousMode::Etcd { endpoints: vec![endpoint.clone()] }, None),
        ];
        for (nodes, rendezvous, expected) in table {
            let nodes: NodeRange = nodes.parse().unwrap();
            let error = rendezvous.check(nodes).err().map(|error| error.to_string());
            match (&error, expected) {
                (None, None) => {}
                (Some(error), Some(expected)) if error.starts_with(expected) => {}
                _ => panic!("{rendezvous:?}, {nodes}: {error:?}, expected {expected:?}"),
            }
        }
    }
}
