//! Why a job on several hosts was not started.

use std::fmt;
use std::io;

use brigade_rank_env::text::counted;
use brigade_ssh::{HostListError, RemoteError};

/// Nothing of the user's program has run on any host when one of these is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// The list of hosts cannot be read.
    #[error(transparent)]
    List(#[from] HostListError),
    /// The hosts cannot be reached as the options say.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The list of hosts is empty.
    #[error("the list of hosts is empty")]
    NoHost,
    /// A host has no number of ranks.
    #[error("{host} has no number of ranks: write {host}:N, or give --nproc N for all hosts")]
    NoSlots {
        /// The host.
        host: String,
    },
    /// `--nnodes` differs from the number of hosts in the list.
    #[error(
        "--nnodes {nodes}, but the list has {}: give {named}, or MIN:{named} for a job that goes on \
         with MIN of them",
        counted(.named, "host")
    )]
    OtherNumber {
        /// Its value.
        nodes: String,
        /// The number of hosts in the list.
        named: usize,
    },
    /// Hosts that cannot take part.
    #[error("{}", lines(.0))]
    Hosts(Vec<HostFailure>),
    /// Something that was to be copied cannot be read here.
    #[error("--sync: {what}: {reason}")]
    Sync {
        /// What.
        what: String,
        /// Why.
        reason: String,
    },
    /// The system refused something that the launcher needs.
    #[error("cannot {action}: {source}")]
    System {
        /// What was refused.
        action: String,
        /// Why.
        source: io::Error,
    },
}

/// One host that cannot take part, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFailure {
    /// Its name as the user wrote it.
    pub host: String,
    /// One line.
    pub reason: String,
    /// The exit code that says so: 127 and 126 for a program that is missing or cannot be run.
    pub code: u8,
}

impl HostsError {
    /// The shell's codes for what a user can mend, 1 for the rest.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Hosts(failures) => failures.first().map_or(1, |failure| failure.code),
            Self::Remote(error) => error.exit_code(),
            Self::Sync { .. } | Self::System { .. } => 1,
            _ => 2,
        }
    }

    /// For `map_err`: the action that the system refused.
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

/// One line for each host; the first gets its prefix where the error is printed.
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
