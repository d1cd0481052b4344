//! What agents and the coordinator say to each other.
//!
//! An agent joins and waits. The coordinator starts an attempt on all agents; when a rank fails, a
//! host is lost or one comes, it stops the attempt everywhere and starts the next one, or ends the
//! job. In an attempt and in the change to the next one, each agent sends and gets a number of
//! messages that does not depend on the number of agents.

use std::fmt;
use std::os::unix::process::ExitStatusExt;

use brigade_hardware::DeviceFault;
use brigade_rank_env::text::{printable, printable_lines};
use serde::{Deserialize, Serialize};

/// Version of this protocol; both sides must have the same.
pub const PROTOCOL: u32 = 3;

/// More faults of devices than that are not taken from one failure.
pub(crate) const MAX_FAULTS: usize = 16;

/// Milliseconds of the sender's own monotonic clock, from a start of its choosing.
pub type Millis = u64;

/// From an agent to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// First: asks to take part.
    Join(Join),
    /// A rank of this host ended with a code other than 0 or by a signal that is not the agent's.
    Failed(RankFailure),
    /// All ranks of this host run. Sent where [`Assignment::recorded`] asks for it, and again after a
    /// break.
    Started {
        /// In which attempt.
        attempt: u32,
        /// Their process numbers, by local rank.
        pids: Vec<i32>,
        /// When.
        at: Millis,
    },
    /// A rank of this host has ended, however it did. Sent as [`FromAgent::Started`] is.
    Exited {
        /// In which attempt.
        attempt: u32,
        /// Its number on its host.
        local_rank: usize,
        /// How it ended.
        exit_status: ExitStatus,
        /// When.
        at: Millis,
    },
    /// Every rank of this host ended with 0.
    Finished {
        /// In which attempt.
        attempt: u32,
    },
    /// The answer to [`ToAgent::Stop`]: no process of the attempt is left.
    Stopped {
        /// Which attempt.
        attempt: u32,
        /// A port for the ranks to meet at, held by the agent, should it be the first host next.
        port: u16,
        /// Ranks did not stop in time and were killed.
        killed: bool,
        /// Ranks that SIGKILL did not end, in words: the host can take part in no other attempt.
        #[serde(default)]
        stuck: Option<String>,
    },
    /// This agent was sent a signal that asks the job to stop.
    Interrupted {
        /// The signal's number.
        signal: i32,
        /// Counts the requests of this agent from 1, so that one that is sent again after a break
        /// is not taken for another one.
        count: u32,
    },
    /// This host leaves; the job may go on without it. It stops its ranks by itself.
    Leaving,
    /// This host cannot do its part: its ranks could not be started.
    Unable {
        /// Why.
        reason: String,
    },
    /// Whole lines of its ranks, prefixed, when they are to be shown where the coordinator is.
    Output {
        /// Where they belong.
        stream: Stream,
        /// The lines.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// A line of the agent's own for the user.
    Say {
        /// The line, without its end.
        text: String,
    },
    /// How far its ranks are, a few times a second at most, where that is shown where the coordinator
    /// is. None: they have ended.
    Progress {
        /// Ranks and their reports, as they have written them.
        ranks: Vec<(usize, String)>,
    },
    /// Nothing has happened, but this host is alive.
    Beat {
        /// When it was sent.
        sent: Millis,
    },
}

/// Asks to take part in a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// [`PROTOCOL`] of the agent.
    pub protocol: u32,
    /// Its version, for the message when the protocols differ.
    pub version: String,
    /// Name of the job; over TCP, what stands for it on that connection.
    pub run_id: String,
    /// Host name, for messages.
    pub host: String,
    /// Process number of the agent.
    pub pid: u32,
    /// Name of the agent, which no other has.
    pub agent: String,
    /// 0: it is new. Else it has asked to join before, only its connection was lost, and it asks for
    /// its seat for this many times. Where it has seen no attempt, the request before may be lost,
    /// too: then it is new, and is answered with [`ToAgent::Resumed`] all the same.
    pub resume: u32,
    /// How many ranks it will start.
    pub nproc: usize,
    /// The place that the user gave it, where there is one.
    pub node_rank: Option<usize>,
    /// Name or address under which other hosts reach it; `None`: as the coordinator sees it.
    pub address: Option<String>,
    /// A port for the ranks to meet at, held by the agent, should it be the first host.
    pub port: u16,
    /// The last attempt it took part in, when it had another coordinator or another connection
    /// before.
    pub last_attempt: Option<u32>,
    /// Its place in that attempt, so that a new coordinator keeps the order of the hosts.
    #[serde(default)]
    pub last_node_rank: Option<usize>,
    /// How many restarts that coordinator had counted.
    pub restarts: u32,
    /// When this was sent.
    pub sent: Millis,
}

/// A rank that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    /// In which attempt.
    pub attempt: u32,
    /// Its number in the job.
    pub rank: usize,
    /// Its number on its host.
    pub local_rank: usize,
    /// Host name.
    pub host: String,
    /// Process number.
    pub pid: i32,
    /// How it ended.
    pub exit_status: ExitStatus,
    /// When it was, on the agent's clock: its error was written before the agent saw the end, and a
    /// rank that was killed had ended for its peers before.
    pub at: Millis,
    /// Its last lines, oldest first, and where they were printed.
    pub last_lines: Vec<String>,
    /// The stream of `last_lines`.
    pub stream: Stream,
    /// What it wrote into its error file, if it did.
    pub error: Option<String>,
    /// What its agent knows about the reason besides: that memory ran out, say.
    #[serde(default)]
    pub hint: Option<String>,
    /// Faults of the job's devices that drivers have reported, on the hosts where ranks have failed.
    #[serde(default)]
    pub device_faults: Vec<DeviceFault>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

/// One of a process's two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Stream {
    /// Standard output and standard error, in the order of [`Stream::index`].
    pub const BOTH: [Self; 2] = [Self::Stdout, Self::Stderr];

    /// Returns its index in [`Stream::BOTH`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// Returns its name: "stdout" or "stderr".
    ///
    /// ```
    /// use brigade_rendezvous::Stream;
    /// assert_eq!(Stream::BOTH.map(Stream::name), ["stdout", "stderr"]);
    /// assert_eq!(Stream::Stderr.index(), 1);
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// From the coordinator to an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// It cannot take part. The connection is closed after this.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
    /// Its seat was kept: the answer to a [`Join`] that resumes. What it may have missed follows.
    Resumed,
    /// It takes part once the others are there.
    Waiting {
        /// Hosts that are there.
        have: usize,
        /// Hosts that are needed.
        need: usize,
    },
    /// Start the ranks.
    Start(Assignment),
    /// Stop the ranks of the attempt: this signal, then, after the time limit, SIGKILL.
    Stop {
        /// Which attempt.
        attempt: u32,
        /// The signal to begin with.
        signal: i32,
        /// What the user is told.
        reason: String,
    },
    /// Kill at once what still runs: the stop was asked for a second time.
    Kill,
    /// Hand this signal on to the ranks that run, which goes on.
    Signal {
        /// SIGUSR1 or SIGUSR2.
        signal: i32,
    },
    /// The coordinator has shown this much output; the agent may send as much more.
    Taken {
        /// How many bytes.
        bytes: u64,
    },
    /// The job is over.
    End(JobResult),
    /// Nothing has happened, but the coordinator is alive.
    Beat,
}

/// A host's part in an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Which attempt, from 0.
    pub attempt: u32,
    /// How many restarts after failures there have been.
    pub restarts: u32,
    /// How many are allowed.
    pub max_restarts: u32,
    /// Number of this host, from 0.
    pub node_rank: usize,
    /// Number of hosts.
    pub num_nodes: usize,
    /// Number of this host's first rank in the job.
    pub first_rank: usize,
    /// How many ranks this host starts.
    pub nproc: usize,
    /// Number of ranks in the job.
    pub world_size: usize,
    /// Host on which rank 0 runs.
    pub master_addr: String,
    /// Port at which rank 0 listens, held by that host's agent.
    pub master_port: u16,
    /// The coordinator keeps a record of the job: it is told of each rank's start and end.
    #[serde(default)]
    pub recorded: bool,
}

/// How the job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobResult {
    /// The exit code of every agent.
    pub code: u8,
    /// Why the job did not simply finish.
    pub cause: Option<Cause>,
}

/// Why a job did not simply finish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// This rank failed first.
    Failed(RankFailure),
    /// A signal stopped it; the failure, if any, that decided the exit code.
    Interrupted {
        /// By this signal.
        signal: i32,
        /// A rank that ended otherwise than the signal explains.
        failure: Option<RankFailure>,
    },
    /// A host is gone, and the job could not go on without it.
    HostLost {
        /// Host name.
        host: String,
        /// How that was seen.
        how: String,
    },
    /// Not enough hosts came in time.
    TooFewHosts {
        /// Hosts that came.
        have: usize,
        /// Hosts that were needed.
        need: usize,
        /// After this long.
        seconds: u64,
    },
}

impl FromAgent {
    /// The same with names, reasons and errors that are fit to be shown. What ranks have printed stays as
    /// it is.
    pub(crate) fn printable(self) -> Self {
        match self {
            Self::Join(join) => Self::Join(Join {
                version: printable(&join.version),
                run_id: printable(&join.run_id),
                host: printable(&join.host),
                address: join.address.as_deref().map(printable),
                ..join
            }),
            Self::Failed(failure) => Self::Failed(failure.printable()),
            Self::Unable { reason } => Self::Unable { reason: printable(&reason) },
            Self::Say { text } => Self::Say { text: printable(&text) },
            Self::Stopped { attempt, port, killed, stuck } => {
                let stuck = stuck.as_deref().map(printable);
                Self::Stopped { attempt, port, killed, stuck }
            }
            Self::Started { .. }
            | Self::Exited { .. }
            | Self::Finished { .. }
            | Self::Interrupted { .. }
            | Self::Leaving
            | Self::Output { .. }
            | Self::Progress { .. }
            | Self::Beat { .. } => self,
        }
    }
}

impl ToAgent {
    /// The same with names and reasons that are fit to be shown.
    pub(crate) fn printable(self) -> Self {
        match self {
            Self::Refused { reason } => Self::Refused { reason: printable(&reason) },
            Self::Start(part) => {
                Self::Start(Assignment { master_addr: printable(&part.master_addr), ..part })
            }
            Self::Stop { attempt, signal, reason } => {
                Self::Stop { attempt, signal, reason: printable(&reason) }
            }
            Self::End(JobResult { code, cause }) => {
                Self::End(JobResult { code, cause: cause.map(Cause::printable) })
            }
            Self::Resumed
            | Self::Waiting { .. }
            | Self::Kill
            | Self::Signal { .. }
            | Self::Taken { .. }
            | Self::Beat => self,
        }
    }
}

impl Cause {
    fn printable(self) -> Self {
        match self {
            Self::Failed(failure) => Self::Failed(failure.printable()),
            Self::Interrupted { signal, failure } => {
                Self::Interrupted { signal, failure: failure.map(RankFailure::printable) }
            }
            Self::HostLost { host, how } => {
                Self::HostLost { host: printable(&host), how: printable(&how) }
            }
            Self::TooFewHosts { .. } => self,
        }
    }
}

impl Join {
    /// A request of this version, process and moment, for one rank; the rest is filled in.
    ///
    /// ```
    /// use brigade_rendezvous::{Join, PROTOCOL};
    /// let join = Join { run_id: "night".into(), nproc: 4, ..Join::new("node1") };
    /// assert_eq!((join.protocol, join.nproc, join.pid), (PROTOCOL, 4, std::process::id()));
    /// ```
    #[must_use]
    pub fn new(host: &str) -> Self {
        Self {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            run_id: String::new(),
            host: host.into(),
            pid: std::process::id(),
            agent: String::new(),
            resume: 0,
            nproc: 1,
            node_rank: None,
            address: None,
            port: 0,
            last_attempt: None,
            last_node_rank: None,
            restarts: 0,
            sent: 0,
        }
    }
}

impl RankFailure {
    fn printable(self) -> Self {
        let hint = self.hint.as_deref().map(printable);
        let error = self.error.as_deref().map(printable_lines);
        let faults = self.device_faults.into_iter().take(MAX_FAULTS);
        let device_faults = faults.map(|fault| fault.with_texts(printable)).collect();
        Self { host: printable(&self.host), hint, error, device_faults, ..self }
    }

    /// One line: which rank failed, on which host, and how.
    ///
    /// ```
    /// # use brigade_rendezvous::{ExitStatus, RankFailure, Stream};
    /// # let failure = RankFailure {
    /// #     attempt: 0, rank: 5, local_rank: 1, host: "node2".into(), pid: 42,
    /// #     exit_status: ExitStatus::Code(3), at: 0, last_lines: vec![], stream: Stream::Stderr,
    /// #     error: None, hint: None, device_faults: vec![],
    /// # };
    /// assert_eq!(failure.summary(), "rank 5 on node2 (local rank 1, pid 42) failed: exit code 3");
    /// ```
    #[must_use]
    pub fn summary(&self) -> String {
        let Self { rank, local_rank, host, pid, exit_status, .. } = self;
        let place = if host.is_empty() { String::new() } else { format!(" on {host}") };
        let local =
            if rank == local_rank { String::new() } else { format!("local rank {local_rank}, ") };
        format!("rank {rank}{place} ({local}pid {pid}) failed: {exit_status}")
    }
}

impl ExitStatus {
    /// The exit code that a shell gives: the code itself, or 128 + the signal's number.
    ///
    /// ```
    /// use brigade_rendezvous::ExitStatus;
    /// assert_eq!(ExitStatus::Code(3).exit_code(), 3);
    /// assert_eq!(ExitStatus::Signal(9).exit_code(), 137);
    /// assert_eq!(ExitStatus::Signal(9).to_string(), "killed by SIGKILL");
    /// ```
    #[must_use]
    pub fn exit_code(self) -> u8 {
        // Both fit: a code is one byte, and signals stop at 64.
        match self {
            Self::Code(code) => code.to_le_bytes()[0],
            Self::Signal(signal) => 128 | signal.to_le_bytes()[0],
        }
    }
}

impl From<std::process::ExitStatus> for ExitStatus {
    fn from(status: std::process::ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(number) => match nix::sys::signal::Signal::try_from(number) {
                Ok(signal) => write!(f, "killed by {signal}"),
                Err(_) => write!(f, "killed by signal {number}"),
            },
        }
    }
}
