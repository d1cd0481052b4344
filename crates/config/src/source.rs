//! Where a value comes from.

use std::fmt;
use std::path::PathBuf;

/// Where a user set a value. The later variants win over the earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Not set.
    Default,
    /// A line of a settings file.
    File {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// The scheduler that started this process, and the variable by which it says so.
    Scheduler(String),
    /// A variable of the environment.
    Variable(String),
    /// A flag, without its dashes.
    Flag(String),
    /// An argument of a command, which has no dashes: `env.NCCL_DEBUG`.
    Argument(String),
}

impl Source {
    /// Layers have the same number where neither wins over the other.
    #[must_use]
    pub fn layer(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::File { .. } => 1,
            Self::Scheduler(_) => 2,
            Self::Variable(_) => 3,
            Self::Flag(_) | Self::Argument(_) => 4,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Scheduler(words) => f.write_str(words),
            Self::Variable(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag --{name}"),
            Self::Argument(name) => f.write_str(name),
        }
    }
}
