//! Outcome of a job, from the view of this host's launcher.

use brigade_rendezvous::{Cause, ExitStatus, JobResult, RankFailure};
use nix::sys::signal::Signal;

/// Outcome of a job on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Outcome {
    /// The job is over, with this result on all hosts.
    Over(JobResult),
    /// The reader of the output of this host's ranks has closed it.
    OutputClosed,
    /// A signal stopped the job on this host, if no coordinator was connected.
    Stopped {
        /// Number of the signal.
        signal: i32,
    },
    /// Ranks of this host have survived SIGKILL: they sleep in the kernel and still hold their resources.
    Stuck {
        /// Description of the ranks.
        ranks: String,
        /// Outcome of the job apart from these ranks, as far as it is known.
        otherwise: Option<Box<Self>>,
    },
    /// This host left the job because of a signal. The job may continue without it.
    Left {
        /// Number of the signal.
        signal: i32,
    },
    /// The connection to the coordinator was lost, and this host's part of the job with it.
    Lost {
        /// Address of the coordinator.
        coordinator: String,
        /// Description of how the loss was detected.
        how: String,
        /// `true` if another host could have replaced the coordinator, as with etcd, had a restart been left.
        replaceable: bool,
    },
}

impl Outcome {
    /// Returns the launcher's exit code: that of the first failed rank, 128 + the number of the signal that stopped the
    /// job, 1 for a lost host, 0 when the ranks ended normally; 137 when a rank survives SIGKILL, whatever happened
    /// before.
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

    /// Returns the rank that failed first, where that ended the job.
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
