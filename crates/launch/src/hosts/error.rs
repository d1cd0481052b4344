//! Errors of a job on several hosts that was not started.

use std::fmt;
use std::io;

use brigade_rank_env::text::counted;
use brigade_ssh::{HostListError, RemoteError};

/// Error of a launch on several hosts that ended before the user's program ran on any of them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// The list of hosts cannot be read.
    #[error(transparent)]
    List(#[from] HostListError),
    /// The hosts cannot be reached with these options.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The list of hosts is empty.
    #[error("the list of hosts is empty")]
    NoHost,
    /// The number of ranks of a host is unknown.
    #[error("{host} has no number of ranks: write {host}:N, or give --nproc N for all hosts")]
    NoSlots {
        /// Name of the host.
        host: String,
    },
    /// `--nnodes` differs from the number of hosts in the list.
    #[error(
        "--nnodes {nodes}, but the list has {}: give {named}, or MIN:{named} for a job that can continue \
         with MIN of them",
        counted(.named, "host")
    )]
    OtherNumber {
        /// Value of the `--nnodes` option.
        nodes: String,
        /// Number of hosts in the list.
        named: usize,
    },
    /// Some of the hosts cannot take part.
    #[error("{}", lines(.0))]
    Hosts(Vec<HostFailure>),
    /// A file that was to be copied to the hosts cannot be read.
    #[error("--sync: {what}: {reason}")]
    Sync {
        /// Description of the file.
        what: String,
        /// Reason for the failure.
        reason: String,
    },
    /// The operating system refused an operation that the launcher needs.
    #[error("cannot {action}: {source}")]
    System {
        /// Operation that was refused.
        action: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Failure of one host that cannot take part in the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFailure {
    /// Name of the host as the user wrote it.
    pub host: String,
    /// Reason for the failure, in one line.
    pub reason: String,
    /// Exit code for this failure: 127 for a program that is missing, 126 for one that cannot be run.
    pub code: u8,
}

impl HostsError {
    /// Returns the exit code: the shell's codes for failures that a user can fix, 1 for others.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Hosts(failures) => failures.first().map_or(1, |failure| failure.code),
            Self::Remote(error) => error.exit_code(),
            Self::Sync { .. } | Self::System { .. } => 1,
            _ => 2,
        }
    }

    /// Returns a closure for `map_err` that adds the action that the system refused.
    pub(crate) fn system<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::System { action, source: source.into() }
    }
}

impl fmt::Display for HostFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.host, self.reason)
    }
}

/// Formats one line for each host; the first one gets its prefix where the error is printed.
fn lines(failures: &[HostFailure]) -> String {
    failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("\nbrigade: ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_another_length() {
        let said = |named| HostsError::OtherNumber { nodes: "3".to_owned(), named }.to_string();
        assert!(
            said(1).starts_with("--nnodes 3, but the list has 1 host: give 1, "),
            "{}",
            said(1)
        );
        assert!(said(2).starts_with("--nnodes 3, but the list has 2 hosts: "), "{}", said(2));
    }
}
