//! Errors about the contents of a file, before its path is added.

use std::fmt::Display;
use std::path::Path;

use crate::Error;

/// An error about the bytes of a file.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The bytes are inconsistent.
    Damaged(String),
    /// The bytes use an unsupported feature.
    Unsupported(String),
    /// A record continues after the end.
    Ended,
    /// The bytes could not be read.
    Io(std::io::Error),
    /// The data read could not be written.
    Write(std::io::Error),
}

impl Fault {
    pub(crate) fn damaged(fact: impl Display) -> Self {
        Self::Damaged(fact.to_string())
    }

    pub(crate) fn unsupported(fact: impl Display) -> Self {
        Self::Unsupported(fact.to_string())
    }

    /// Adds the place of the value in the file's tree.
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
