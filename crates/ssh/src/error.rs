//! Errors of the access to other hosts.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::escaped;

use crate::ExecutableError;

/// Error of the access to other hosts, returned before any host is connected to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The ssh client cannot be started.
    #[error(transparent)]
    Client(#[from] ExecutableError),
    /// The user's own command for ssh cannot be parsed.
    #[error("{origin} `{text}`: {expected}")]
    SshCommand {
        /// Option or variable that the command is from.
        origin: &'static str,
        /// Text of the command.
        text: String,
        /// Description of the valid syntax.
        expected: &'static str,
    },
    /// A value of `--env-pass` is not a variable.
    #[error("--env-pass {text}: {expected}")]
    EnvRequest {
        /// Value of the option.
        text: String,
        /// Description of the valid syntax.
        expected: String,
    },
    /// A variable that is to be passed on is not set.
    #[error(
        "--env-pass {name}: this environment has no such variable; set one with --env {name}=VALUE"
    )]
    NoVariable {
        /// Name of the variable.
        name: String,
    },
    /// A line of DeepSpeed's environment file cannot be parsed.
    #[error("{}", escaped(format_args!("{}, line {line}: `{found}`: {expected}", path.display())))]
    EnvironmentFile {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Text of the line.
        found: String,
        /// Description of the valid syntax.
        expected: String,
    },
    /// The path of the working folder leads to another folder on another host.
    #[error("the working folder {} is not an absolute path: give one with --workdir", path.display())]
    Workdir {
        /// Path of the folder.
        path: PathBuf,
    },
    /// The operating system refused an operation.
    #[error("cannot {action}: {source}")]
    System {
        /// Operation that was refused.
        action: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl RemoteError {
    /// Returns the exit code: the shell's for a missing client, 1 for an operation that the system refused, else 2.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(error) => error.exit_code(),
            Self::System { .. } => 1,
            _ => 2,
        }
    }

    /// Returns a closure for `map_err` that adds the action that the system refused.
    pub(crate) fn system(action: &str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action: action.to_owned(), source }
    }
}
