//! Events of a job for its record: one for each occurrence that an operator may want to look up later.

use std::time::Duration;

use brigade_hardware::DeviceFault;
use brigade_rank_env::text::counted;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::{Cause, ExitStatus};

/// Event of a job. The fields are described in `docs/events.md`.
///
/// As JSON it is an object with the name of its kind in `event`; fields without a value are left out.
///
/// ```
/// use brigade_rendezvous::JobEvent;
/// let line = r#"{"event":"exit","attempt":0,"rank":3,"local_rank":1,"host":"node2","pid":42,"code":1}"#;
/// let event: JobEvent = serde_json::from_str(line)?;
/// assert!(matches!(event, JobEvent::Exit { rank: 3, code: Some(1), signal: None, .. }));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobEvent {
    /// A host has joined the job.
    Join {
        /// Name of the host.
        host: String,
        /// Number of ranks that the host starts.
        nproc: usize,
    },
    /// An attempt begins: all its hosts start their ranks.
    Attempt {
        /// Number of the attempt, from 0.
        attempt: u32,
        /// Number of restarts after failures so far.
        restarts: u32,
        /// Maximum number of restarts.
        max_restarts: u32,
        /// Number of ranks in the attempt.
        world_size: usize,
        /// Hosts of the attempt, by node rank.
        hosts: Vec<HostPart>,
    },
    /// A rank has been started.
    Start {
        /// Number of the attempt.
        attempt: u32,
        /// Rank in the job.
        rank: usize,
        /// Local rank: the rank's number on its host.
        local_rank: usize,
        /// Name of the host.
        host: String,
        /// Process number on that host.
        pid: i32,
    },
    /// A rank has ended. Ranks of a lost host have no such event.
    Exit {
        /// Number of the attempt.
        attempt: u32,
        /// Rank in the job.
        rank: usize,
        /// Local rank: the rank's number on its host.
        local_rank: usize,
        /// Name of the host.
        host: String,
        /// Process number on that host.
        pid: i32,
        /// Exit code, unless a signal killed the rank.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<i32>,
        /// Signal that killed the rank: `SIGKILL`, or its number if it has no name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<String>,
    },
    /// A host no longer takes part in the job.
    Leave {
        /// Name of the host.
        host: String,
        /// Reason for the leave, as a text.
        reason: String,
    },
    /// Cause of the end of an attempt or the job that did not end normally. Recorded once its ranks have stopped,
    /// because only then the first of several failures is known.
    Cause(Box<JobCause>),
    /// An attempt has been stopped and another one follows.
    Restart {
        /// Number of the attempt that was stopped.
        attempt: u32,
        /// Number of restarts after failures, this one included if a failure was the cause.
        restarts: u32,
        /// Maximum number of restarts.
        max_restarts: u32,
    },
    /// The job is over.
    End {
        /// Exit code of the job's launchers.
        code: u8,
    },
    /// An event of a later version of the format.
    #[serde(other)]
    Unknown,
}

/// A host's part in an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPart {
    /// Name of the host.
    pub host: String,
    /// Number of the host, from 0.
    pub node_rank: usize,
    /// Number of its first rank in the job.
    pub first_rank: usize,
    /// Number of ranks on the host.
    pub nproc: usize,
}

/// Cause of the end of an attempt or a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCause {
    /// Number of the attempt. `None` before the first attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// Kind of the cause.
    pub cause: CauseKind,
    /// Rank that failed first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Local rank of the failed rank: its number on its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_rank: Option<usize>,
    /// Host of the failed rank, or the lost host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Process number of the failed rank on its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Exit code of the failed rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// Signal that killed the rank, or that was sent to stop the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Description of the cause in one line.
    pub message: String,
    /// Content of the failed rank's error file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Further information of the launcher about the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Faults of the job's devices that drivers have reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_faults: Vec<DeviceFault>,
    /// Last output lines of the failed rank, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_lines: Vec<String>,
}

/// Kind of cause for the end of an attempt or a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CauseKind {
    /// A rank ended with a code other than 0, or by a signal that the user did not send.
    RankFailed,
    /// A host was lost.
    HostLost,
    /// Too few hosts joined in time.
    TooFewHosts,
    /// A signal stopped the job.
    Interrupted,
    /// The set of hosts changed: hosts joined or left, without a failure.
    HostsChanged,
    /// A cause of a later version of the format.
    #[default]
    #[serde(other)]
    Unknown,
}

/// An event and its time on the coordinator's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Time of the event.
    pub at: Duration,
    /// The recorded event.
    pub event: JobEvent,
}

impl JobCause {
    pub(super) fn of(attempt: Option<u32>, cause: &Cause) -> Self {
        let this = Self { attempt, ..Self::default() };
        match cause {
            Cause::Failed(failure) => {
                Self { cause: CauseKind::RankFailed, ..this.failure(failure) }
            }
            Cause::Interrupted { signal, failure } => {
                let signal = signal_name(*signal);
                let mut message = format!("stopped by {signal}");
                let this = match failure {
                    Some(failure) => {
                        message.push_str(&format!("; the first to fail: {}", failure.summary()));
                        this.failure(failure)
                    }
                    None => this,
                };
                Self { cause: CauseKind::Interrupted, signal: Some(signal), message, ..this }
            }
            Cause::HostLost { host, how } => Self {
                cause: CauseKind::HostLost,
                host: Some(host.clone()),
                message: format!("{host} is lost: {how}"),
                ..this
            },
            Cause::TooFewHosts { have, need, seconds } => Self {
                cause: CauseKind::TooFewHosts,
                message: format!(
                    "only {have} of {} came within {seconds} s",
                    counted(need, "host")
                ),
                ..this
            },
        }
    }

    fn failure(self, failure: &crate::RankFailure) -> Self {
        let (code, signal) = parts(failure.exit_status);
        Self {
            rank: Some(failure.rank),
            local_rank: Some(failure.local_rank),
            host: Some(failure.host.clone()),
            pid: Some(failure.pid),
            code,
            signal,
            message: failure.summary(),
            error: failure.error.clone(),
            hint: failure.hint.clone(),
            device_faults: failure.device_faults.clone(),
            last_lines: failure.last_lines.clone(),
            ..self
        }
    }
}

pub(super) fn parts(exit_status: ExitStatus) -> (Option<i32>, Option<String>) {
    match exit_status {
        ExitStatus::Code(code) => (Some(code), None),
        ExitStatus::Signal(signal) => (None, Some(signal_name(signal))),
    }
}

fn signal_name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(|_| signal.to_string(), |known| known.to_string())
}
