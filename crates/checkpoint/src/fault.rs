//! What is wrong inside a file, before its path is put to it.

use std::fmt::Display;
use std::path::Path;

use crate::Error;

/// A fact about the bytes of a file.
#[derive(Debug)]
pub(crate) enum Fault {
    /// They contradict themselves.
    Damaged(String),
    /// They use something that is not known here.
    Unsupported(String),
    /// A record goes on after the last of them.
    Ended,
    /// They could not be read.
    Io(std::io::Error),
    /// What was read from them could not be written.
    Write(std::io::Error),
}

impl Fault {
    pub(crate) fn damaged(fact: impl Display) -> Self {
        Self::Damaged(fact.to_string())
    }

    pub(crate) fn unsupported(fact: impl Display) -> Self {
        Self::Unsupported(fact.to_string())
    }

    /// The fault of a value at `place` in the file's tree.
    pub(crate) fn about(self, place: &str) -> Self {
        match self {
            Self::Damaged(fact) if !place.is_empty() => Self::Damaged(format!("`{place}`: {fact}")),
            Self::Unsupported(fact) if !place.is_empty() => {
                Self::Unsupported(format!("`{place}`: {fact}"))
            }
            other => other,
        }
    }

    pub(crate) fn at(self, path: &Path) -> Error {
        let path = path.to_owned();
        match self {
            Self::Damaged(fact) => Error::Damaged { path, fact },
            Self::Unsupported(fact) => Error::Unsupported { path, fact },
            Self::Ended => Error::Damaged { path, fact: "a record ends too early".into() },
            Self::Io(source) => Error::Io { doing: "read", path, source },
            Self::Write(source) => Error::Io { doing: "write a tensor of", path, source },
        }
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Self::damaged("it ends too early"),
            _ => Self::Io(error),
        }
    }
}
