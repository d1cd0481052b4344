//! Why a job on several hosts was not started.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::hostfile::HostListError;
use crate::ProgramError;

/// Nothing of the user's program has run on any host when one of these is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// The list of hosts cannot be read.
    #[error(transparent)]
    List(#[from] HostListError),
    /// The client of ssh cannot be started.
    #[error(transparent)]
    Client(ProgramError),
    /// The user's own command for ssh is none.
    #[error("{origin} `{text}`: {expected}")]
    SshCommand {
        /// The option or variable that says so.
        origin: &'static str,
        /// What it says.
        text: String,
        /// What it should say.
        expected: &'static str,
    },
    /// There is nothing to start a job on.
    #[error("the list of hosts is empty")]
    NoHost,
    /// It is not said how many ranks a host is to start.
    #[error("{host} has no number of ranks: write {host}:N, or give --nproc N for all hosts")]
    NoSlots {
        /// The host.
        host: String,
    },
    /// `--nnodes` says otherwise than the list.
    #[error(
        "--nnodes {nodes}, but the list has {named} hosts: give {named}, or MIN:{named} for a \
             job that goes on with MIN of them"
    )]
    OtherNumber {
        /// What it says.
        nodes: String,
        /// How many there are.
        named: usize,
    },
    /// What is to be passed on is no variable.
    #[error("--env-pass {text}: {expected}")]
    EnvRequest {
        /// What was asked for.
        text: String,
        /// What was expected.
        expected: String,
    },
    /// A variable to be passed on is not set.
    #[error(
        "--env-pass {name}: this environment has no such variable; set one with --env {name}=VALUE"
    )]
    NoVariable {
        /// Its name.
        name: String,
    },
    /// DeepSpeed's file of variables has a line that is none.
    #[error("{}, line {line}: `{found}`: {expected}", path.display())]
    EnvironmentFile {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What stands there.
        found: String,
        /// What should stand there.
        expected: String,
    },
    /// Hosts that cannot take part.
    #[error("{}", lines(.0))]
    Hosts(Vec<HostFailure>),
    /// The folder to work in cannot be given to another host.
    #[error("the working folder {} is no absolute path: give one with --workdir", path.display())]
    Workdir {
        /// What it is.
        path: PathBuf,
    },
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
            Self::Client(error) => error.exit_code(),
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

/// One line for each host; the first gets its prefix from whoever prints the error.
fn lines(failures: &[HostFailure]) -> String {
    failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("\nbrigade: ")
}
