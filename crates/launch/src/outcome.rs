//! How a job ended, as this host's launcher sees it.

use brigade_rendezvous::{Cause, ExitStatus, JobResult, RankFailure};
use nix::sys::signal::Signal;

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Outcome {
    /// The job is over, with this result on all hosts.
    Over(JobResult),
    /// The reader of the output of this host's ranks has gone.
    OutputClosed,
    /// This signal has stopped the job here, and there was no coordinator to say more.
    Stopped {
        /// The signal's number.
        signal: i32,
    },
    /// Ranks of this host have survived SIGKILL: they sleep in the kernel, and a process that starts
    /// something here next should know.
    Stuck {
        /// Which ranks, in words.
        ranks: String,
        /// How the job ended otherwise, as far as that is known.
        otherwise: Option<Box<Self>>,
    },
    /// This host left the job because of this signal; the job may go on without it.
    Left {
        /// The signal's number.
        signal: i32,
    },
    /// The connection to the coordinator is lost, and with it the job.
    Lost {
        /// Where the coordinator was.
        coordinator: String,
        /// How that was seen.
        how: String,
        /// Another host could have taken over, as it can with etcd, had there been a restart left.
        replaceable: bool,
    },
}

impl Outcome {
    /// The launcher's exit code: the first failing rank's, 128 + the number of the signal that cut
    /// the job short, 1 for a lost host, 0 when the ranks ended well; 137 when a rank survives
    /// SIGKILL, whatever happened before.
    ///
    /// ```
    /// use brigade_launch::Outcome;
    /// assert_eq!(Outcome::OutputClosed.exit_code(), 141);
    /// assert_eq!(Outcome::Left { signal: 15 }.exit_code(), 143);
    /// ```
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Over(job_result) => job_result.code,
            Self::OutputClosed => ExitStatus::Signal(Signal::SIGPIPE as i32).exit_code(),
            Self::Stopped { signal } | Self::Left { signal } => {
                ExitStatus::Signal(*signal).exit_code()
            }
            Self::Stuck { .. } => ExitStatus::Signal(Signal::SIGKILL as i32).exit_code(),
            Self::Lost { .. } => 1,
        }
    }

    /// The rank that failed first, where that ended the job.
    #[must_use]
    pub fn failure(&self) -> Option<&RankFailure> {
        match self {
            Self::Over(JobResult { cause: Some(Cause::Failed(failure)), .. }) => Some(failure),
            Self::Over(JobResult { cause: Some(Cause::Interrupted { failure, .. }), .. }) => {
                failure.as_ref()
            }
            Self::Stuck { otherwise, .. } => otherwise.as_ref()?.failure(),
            _ => None,
        }
    }
}
