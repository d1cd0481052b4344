//! Events of a job that are written down: one for each thing that an operator may ask about later.

use std::time::Duration;

use brigade_hardware::DeviceFault;
use brigade_rank_env::text::counted;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::{Cause, ExitStatus};

/// Something that happened to a job. `docs/events.md` has the fields.
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
        /// Host name.
        host: String,
        /// How many ranks it starts.
        nproc: usize,
    },
    /// An attempt begins: all its hosts are told to start their ranks.
    Attempt {
        /// Which one, from 0.
        attempt: u32,
        /// Restarts after failures so far.
        restarts: u32,
        /// Restarts that are allowed.
        max_restarts: u32,
        /// Number of ranks.
        world_size: usize,
        /// Its hosts, by node rank.
        hosts: Vec<HostPart>,
    },
    /// A rank has been started.
    Start {
        /// In which attempt.
        attempt: u32,
        /// Its number in the job.
        rank: usize,
        /// Its number on its host.
        local_rank: usize,
        /// Host name.
        host: String,
        /// Process number on that host.
        pid: i32,
    },
    /// A rank has ended. Ranks of a lost host have no such event.
    Exit {
        /// In which attempt.
        attempt: u32,
        /// Its number in the job.
        rank: usize,
        /// Its number on its host.
        local_rank: usize,
        /// Host name.
        host: String,
        /// Process number on that host.
        pid: i32,
        /// Its exit code, unless a signal killed it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<i32>,
        /// The signal that killed it: `SIGKILL`, or its number where it has no name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<String>,
    },
    /// A host takes no part any more.
    Leave {
        /// Host name.
        host: String,
        /// Why, in words.
        reason: String,
    },
    /// Why an attempt, or the job, did not simply finish. Written once its ranks have stopped, because
    /// only then the first of several failures is known.
    Cause(Box<JobCause>),
    /// An attempt has been stopped and another one follows.
    Restart {
        /// The attempt that was stopped.
        attempt: u32,
        /// Restarts after failures, this one included where a failure was the cause.
        restarts: u32,
        /// Restarts that are allowed.
        max_restarts: u32,
    },
    /// The job is over.
    End {
        /// The exit code of its launchers.
        code: u8,
    },
    /// An event of a later version of the format.
    #[serde(other)]
    Unknown,
}

/// A host's part in an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPart {
    /// Host name.
    pub host: String,
    /// Number of the host, from 0.
    pub node_rank: usize,
    /// Number of its first rank in the job.
    pub first_rank: usize,
    /// How many ranks it has.
    pub nproc: usize,
}

/// Why an attempt or a job ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCause {
    /// In which attempt; none before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// What kind of cause.
    pub cause: CauseKind,
    /// The rank that failed first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Its number on its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_rank: Option<usize>,
    /// Its host, or the host that is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The rank's process number on that host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The rank's exit code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The signal that killed the rank, or that was sent to stop the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// The cause in one line.
    pub message: String,
    /// What the rank wrote into its error file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What the launcher knows about the reason besides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Faults of the job's devices that drivers have reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_faults: Vec<DeviceFault>,
    /// The rank's last lines of output, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_lines: Vec<String>,
}

/// What kind of cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CauseKind {
    /// A rank ended with another code than 0, or by a signal that the user did not send.
    RankFailed,
    /// A host is gone.
    HostLost,
    /// Not enough hosts came in time.
    TooFewHosts,
    /// A signal stopped the job.
    Interrupted,
    /// Nothing failed: hosts joined or left.
    HostsChanged,
    /// One of a later version of the format.
    #[default]
    #[serde(other)]
    Unknown,
}

/// An event, and when it happened on the coordinator's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When.
    pub at: Duration,
    /// What.
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
