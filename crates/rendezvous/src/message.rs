//! Messages between agents and the coordinator.
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

/// Version of this protocol. Both sides must have the same.
pub const PROTOCOL: u32 = 3;

/// Maximum number of device faults that are taken from one failure.
pub(crate) const MAX_FAULTS: usize = 16;

/// Milliseconds of the sender's own monotonic clock, from a start that the sender chooses.
pub type Millis = u64;

/// Message from an agent to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// First message of an agent: requests to take part in the job.
    Join(Join),
    /// A rank of this host failed: it ended with a code other than 0, or by a signal that the agent did not send.
    Failed(RankFailure),
    /// All ranks of this host have been started. Sent if [`Assignment::recorded`] is set, and again after a
    /// reconnection.
    Started {
        /// Number of the attempt.
        attempt: u32,
        /// Process numbers of the ranks, by local rank.
        pids: Vec<i32>,
        /// Time of the start.
        at: Millis,
    },
    /// A rank of this host has ended, with any exit status. Sent under the same conditions as [`FromAgent::Started`].
    Exited {
        /// Number of the attempt.
        attempt: u32,
        /// Local rank: the rank's number on its host.
        local_rank: usize,
        /// Exit status of the rank.
        exit_status: ExitStatus,
        /// Time of the end.
        at: Millis,
    },
    /// Every rank of this host ended with exit code 0.
    Finished {
        /// Number of the attempt.
        attempt: u32,
    },
    /// Answer to [`ToAgent::Stop`]: no process of the attempt is left.
    Stopped {
        /// Number of the attempt.
        attempt: u32,
        /// Port for the ranks' store, which the agent holds in case its host is the first one in the next attempt.
        port: u16,
        /// `true` if ranks did not stop in time and were killed.
        killed: bool,
        /// Description of the ranks that survived SIGKILL. The host can then take part in no other attempt.
        #[serde(default)]
        stuck: Option<String>,
    },
    /// This agent received a signal that requests the end of the job.
    Interrupted {
        /// Number of the signal.
        signal: i32,
        /// Number of this agent's request, from 1, so that a request that is sent again after a reconnection is not
        /// counted twice.
        count: u32,
    },
    /// This host leaves the job, which may continue without it. It stops its ranks by itself.
    Leaving,
    /// This host cannot do its part because its ranks could not be started.
    Unable {
        /// Reason for the failure.
        reason: String,
    },
    /// Whole lines of its ranks, with prefix, when the coordinator's host shows the output.
    Output {
        /// Output stream of the lines.
        stream: Stream,
        /// Text of the lines.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// A line of the agent itself for the user.
    Say {
        /// Text of the line, without its line end.
        text: String,
    },
    /// Progress reports of this host's ranks, at most a few times per second, when the coordinator's host shows
    /// progress. Empty once the ranks have ended.
    Progress {
        /// Ranks and their encoded reports.
        ranks: Vec<(usize, String)>,
    },
    /// Heartbeat: this host is alive.
    Beat {
        /// Time of sending.
        sent: Millis,
    },
}

/// Request of an agent to take part in a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// Protocol version of the agent: its [`PROTOCOL`].
    pub protocol: u32,
    /// Brigade version of the agent, for the message when the protocols differ.
    pub version: String,
    /// Name of the job. Over TCP, the value that represents it on that connection.
    pub run_id: String,
    /// Host name, for messages.
    pub host: String,
    /// Process number of the agent.
    pub pid: u32,
    /// Unique name of the agent.
    pub agent: String,
    /// Number of times that the agent has requested its seat again after losing its connection. It is 0 for a new
    /// agent. If such an agent has not seen an attempt yet, its earlier request may be lost, too: then it is treated as
    /// new and is answered with [`ToAgent::Resumed`] all the same.
    pub resume: u32,
    /// Number of ranks that the agent will start.
    pub nproc: usize,
    /// Node rank that the user gave the host, if any.
    pub node_rank: Option<usize>,
    /// Name or address under which other hosts reach it. With `None`, the address that the coordinator sees.
    pub address: Option<String>,
    /// Port for the ranks' store, which the agent holds in case its host is the first one.
    pub port: u16,
    /// Last attempt that the agent took part in, when it had another coordinator or another connection before.
    pub last_attempt: Option<u32>,
    /// Node rank of the host in that attempt, so that a new coordinator keeps the order of the hosts.
    #[serde(default)]
    pub last_node_rank: Option<usize>,
    /// Number of restarts that the earlier coordinator had counted.
    pub restarts: u32,
    /// Time of sending.
    pub sent: Millis,
}

/// Report about a failed rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    /// Number of the attempt.
    pub attempt: u32,
    /// Rank in the job.
    pub rank: usize,
    /// Local rank: the rank's number on its host.
    pub local_rank: usize,
    /// Name of the rank's host.
    pub host: String,
    /// Process number of the rank.
    pub pid: i32,
    /// Exit status of the rank.
    pub exit_status: ExitStatus,
    /// Time of the failure on the agent's clock. For a rank that wrote its error, the time of writing, which precedes
    /// the end that the agent detects. For a killed rank, an earlier time as well, because its peers detect the end
    /// before the agent does.
    pub at: Millis,
    /// Last output lines of the rank, oldest first.
    pub last_lines: Vec<String>,
    /// Output stream of `last_lines`.
    pub stream: Stream,
    /// Content of the rank's error file, if it wrote one.
    pub error: Option<String>,
    /// Further information of the agent about the reason, for example that memory ran out.
    #[serde(default)]
    pub hint: Option<String>,
    /// Faults of the job's devices that drivers have reported, on the hosts where ranks have failed.
    #[serde(default)]
    pub device_faults: Vec<DeviceFault>,
}

/// Exit status of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// The process exited with this code.
    Code(i32),
    /// The process was killed by this signal.
    Signal(i32),
}

/// Output stream of a process: standard output or standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output (stdout).
    Stdout,
    /// Standard error (stderr).
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

/// Message from the coordinator to an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// The agent cannot take part. The connection is closed after this message.
    Refused {
        /// Reason for the refusal, and what to do.
        reason: String,
    },
    /// Answer to a [`Join`] that resumes: the agent's seat was kept. Messages that it may have missed follow.
    Resumed,
    /// The agent takes part once enough hosts have joined.
    Waiting {
        /// Number of hosts that have joined.
        have: usize,
        /// Number of hosts that are needed.
        need: usize,
    },
    /// Starts the ranks of an attempt.
    Start(Assignment),
    /// Stops the ranks of the attempt: with this signal, then, after the time limit, with SIGKILL.
    Stop {
        /// Number of the attempt.
        attempt: u32,
        /// Number of the first signal.
        signal: i32,
        /// Reason that is shown to the user.
        reason: String,
    },
    /// Kills the processes that still run at once, because the stop was requested a second time.
    Kill,
    /// Forwards this signal to the ranks. The attempt continues.
    Signal {
        /// Number of the signal: SIGUSR1 or SIGUSR2.
        signal: i32,
    },
    /// The coordinator has shown this much output, and the agent may send as much more.
    Taken {
        /// Number of bytes.
        bytes: u64,
    },
    /// The job is over, with this result.
    End(JobResult),
    /// Heartbeat: the coordinator is alive.
    Beat,
}

/// A host's part in an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Number of the attempt, from 0.
    pub attempt: u32,
    /// Number of restarts after failures so far.
    pub restarts: u32,
    /// Maximum number of restarts.
    pub max_restarts: u32,
    /// Number of this host, from 0.
    pub node_rank: usize,
    /// Number of hosts in the attempt.
    pub num_nodes: usize,
    /// Number of this host's first rank in the job.
    pub first_rank: usize,
    /// Number of ranks that this host starts.
    pub nproc: usize,
    /// Number of ranks in the job.
    pub world_size: usize,
    /// Host on which rank 0 runs.
    pub master_addr: String,
    /// Port at which rank 0 listens. That host's agent holds it.
    pub master_port: u16,
    /// `true` if the coordinator keeps a record of the job: agents report each rank's start and end.
    #[serde(default)]
    pub recorded: bool,
}

/// Result of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobResult {
    /// Exit code of every agent.
    pub code: u8,
    /// Reason why the job did not end normally.
    pub cause: Option<Cause>,
}

/// Reason why a job did not end normally.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// This rank failed first.
    Failed(RankFailure),
    /// A signal stopped the job.
    Interrupted {
        /// Number of the signal.
        signal: i32,
        /// The failure that decided the exit code: a rank that ended in a way that the signal does not explain.
        failure: Option<RankFailure>,
    },
    /// A host was lost, and the job could not continue without it.
    HostLost {
        /// Name of the host.
        host: String,
        /// Description of how the loss was detected.
        how: String,
    },
    /// Too few hosts joined in time.
    TooFewHosts {
        /// Number of hosts that joined.
        have: usize,
        /// Number of hosts that were needed.
        need: usize,
        /// Time waited, in seconds.
        seconds: u64,
    },
}

impl FromAgent {
    /// Returns the failure with escaped names, reasons and errors. Output of ranks is not changed.
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
    /// Returns the result with escaped names and reasons.
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
    /// Creates a request with this program's version, this process and the current time, for one rank. The other fields
    /// have defaults.
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

    /// Formats the failure as one line: the rank, its host, and how it failed.
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
    /// Returns the exit code that a shell gives: the code itself, or 128 + the signal's number.
    ///
    /// ```
    /// use brigade_rendezvous::ExitStatus;
    /// assert_eq!(ExitStatus::Code(3).exit_code(), 3);
    /// assert_eq!(ExitStatus::Signal(9).exit_code(), 137);
    /// assert_eq!(ExitStatus::Signal(9).to_string(), "killed by SIGKILL");
    /// ```
    #[must_use]
    pub fn exit_code(self) -> u8 {
        // Both conversions fit: an exit code is one byte, and signals are at most 64.
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
