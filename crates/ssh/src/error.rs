//! Why other hosts cannot be reached as the user asks.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::escaped;

use crate::ExecutableError;

/// Returned before any host is connected to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The ssh client cannot be started.
    #[error(transparent)]
    Client(#[from] ExecutableError),
    /// The user's own command for ssh cannot be read.
    #[error("{origin} `{text}`: {expected}")]
    SshCommand {
        /// The option or variable that it is from.
        origin: &'static str,
        /// Its value.
        text: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A value of `--env-pass` is not a variable.
    #[error("--env-pass {text}: {expected}")]
    EnvRequest {
        /// The value.
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
    /// A line of DeepSpeed's file of variables cannot be read.
    #[error("{}", escaped(format_args!("{}, line {line}: `{found}`: {expected}", path.display())))]
    EnvironmentFile {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The line.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The working folder means another folder on another host.
    #[error("the working folder {} is not an absolute path: give one with --workdir", path.display())]
    Workdir {
        /// The folder.
        path: PathBuf,
    },
    /// The system refused something.
    #[error("cannot {action}: {source}")]
    System {
        /// What was refused.
        action: String,
        /// Why.
        source: io::Error,
    },
}

impl RemoteError {
    /// Returns the exit code: the shell's for a missing client, 1 for what the system refused, else 2.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(error) => error.exit_code(),
            Self::System { .. } => 1,
            _ => 2,
        }
    }

    /// For `map_err`: the action that the system refused.
    pub(crate) fn system(action: &str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action: action.to_owned(), source }
    }
}
