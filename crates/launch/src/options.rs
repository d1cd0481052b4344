//! What a user can ask of a launch.

use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What to start, how often, and with which other hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchOptions {
    /// Number of ranks on this host: at least 1.
    pub nproc: usize,
    /// The program: a path where it has a slash, else a name that is looked up in `PATH`.
    pub program: OsString,
    /// Its arguments, passed on as they are.
    pub args: Vec<OsString>,
    /// `OMP_NUM_THREADS` of each rank. Default: what the environment says, else the cores of this
    /// host shared out evenly.
    pub threads_per_rank: Option<usize>,
    /// How long ranks may take to stop after SIGTERM before they are killed.
    pub shutdown_timeout: Duration,
    /// How often the job is started again after a failure. Hosts that come or leave do not count.
    pub max_restarts: u32,
    /// How many hosts take part. More than one, or a range, needs a [`Meeting`].
    pub nodes: NodeRange,
    /// Where the agents of the hosts meet.
    pub meeting: Meeting,
    /// Name of the job, the same on all of its hosts (torchrun's `--rdzv-id`). Default: a random
    /// one where the job has one host, `none` where it has several.
    pub run_id: Option<String>,
    /// Agents that cannot show that they know it are turned away. Default: the name of the job,
    /// which keeps out mistakes but nobody who listens on the network.
    pub secret: Option<String>,
    /// Name or address under which other hosts reach this one. Default: as they see it.
    pub local_addr: Option<String>,
    /// How long agents wait for each other.
    pub patience: Patience,
    /// `ROLE_NAME` of each rank.
    pub role: String,
}

/// How many hosts may take part in a job.
///
/// ```
/// use brigade_launch::NodeRange;
/// let range: NodeRange = "2:4".parse()?;
/// assert_eq!((range.min, range.max), (2, 4));
/// assert_eq!("3".parse::<NodeRange>()?.to_string(), "3");
/// assert!("4:2".parse::<NodeRange>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRange {
    /// With fewer the job waits.
    pub min: usize,
    /// With as many it does not wait for more.
    pub max: usize,
}

/// Where the agents of several hosts meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// There is one host only, and nobody to meet.
    OneHost,
    /// The hosts are numbered; number 0 listens and the others connect (`--node-rank`,
    /// `--master-addr`, `--master-port`).
    Static {
        /// Number of this host, from 0.
        node_rank: usize,
        /// Name or address of host 0. On host 0 itself it is only passed on.
        master_addr: String,
        /// The port at which host 0 listens.
        master_port: u16,
    },
    /// The host that the endpoint names listens, hosts come and leave (`--rdzv-endpoint`).
    Elastic {
        /// Where to meet.
        endpoint: Endpoint,
        /// Whether this host listens. Default: when the endpoint is an address of this host and
        /// nobody on this host listens there yet.
        serve: Option<bool>,
    },
    /// The hosts find each other through etcd (`--rdzv-backend etcd`), and one after the other may
    /// be lost.
    Etcd {
        /// Servers of one etcd cluster, tried in order.
        endpoints: Vec<Endpoint>,
    },
}

/// `HOST:PORT`, `[IPV6]:PORT`; without a port, torchrun's for elastic jobs.
///
/// ```
/// use brigade_launch::Endpoint;
/// let endpoint: Endpoint = "node1:1234".parse()?;
/// assert_eq!((endpoint.host.as_str(), endpoint.port), ("node1", 1234));
/// assert_eq!("[::1]".parse::<Endpoint>()?.to_string(), "[::1]:29400");
/// assert!("node1:http".parse::<Endpoint>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Name or address, an IPv6 address without its brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// How long agents wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Until there are enough hosts to start with (`--rdzv-conf join_timeout=`, `timeout=`).
    pub join: Duration,
    /// For further hosts, once there are enough and not all that may come
    /// (`--rdzv-conf last_call_timeout=`).
    pub last_call: Duration,
}

/// One rank of no program on one host; 30 s to stop, as torchrun; no restart.
impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            nproc: 1,
            program: OsString::new(),
            args: Vec::new(),
            threads_per_rank: None,
            shutdown_timeout: Duration::from_secs(30),
            max_restarts: 0,
            nodes: NodeRange::default(),
            meeting: Meeting::OneHost,
            run_id: None,
            secret: None,
            local_addr: None,
            patience: Patience::default(),
            role: "default".to_owned(),
        }
    }
}

/// One host.
impl Default for NodeRange {
    fn default() -> Self {
        Self { min: 1, max: 1 }
    }
}

/// Ten minutes, as torchrun, and three seconds for latecomers at the first start.
impl Default for Patience {
    fn default() -> Self {
        Self { join: Duration::from_secs(600), last_call: Duration::from_secs(3) }
    }
}

/// `N` or `MIN:MAX`
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

/// torchrun's default for elastic jobs.
const ELASTIC_PORT: u16 = 29_400;
