//! Sources of settings.

use std::fmt;
use std::path::PathBuf;

/// Source of a setting. A later variant takes precedence over an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The default value.
    Default,
    /// A line of a settings file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
    },
    /// The scheduler that started this process, with the variable that identifies it.
    Scheduler(String),
    /// An environment variable, by name.
    Variable(String),
    /// A flag, without its dashes.
    Flag(String),
    /// An argument of a command, which has no dashes: `env.NCCL_DEBUG`.
    Argument(String),
}

impl Source {
    /// Returns the precedence of the source. Sources with the same number belong to one layer.
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
