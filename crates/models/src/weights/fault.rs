//! What is wrong inside a file, before its path is put to it.

use std::fmt::Display;
use std::path::Path;

use crate::Error;

/// A fact about the bytes of a file.
#[derive(Debug)]
pub(super) enum Fault {
    /// They contradict themselves.
    Damaged(String),
    /// They use something that is not known here.
    Unsupported(String),
    /// They name a Python object that is not allowed.
    Forbidden(String),
    /// They could not be read.
    Io(std::io::Error),
}

impl Fault {
    pub(super) fn damaged(fact: impl Display) -> Self {
        Self::Damaged(fact.to_string())
    }

    pub(super) fn unsupported(fact: impl Display) -> Self {
        Self::Unsupported(fact.to_string())
    }

    pub(super) fn at(self, path: &Path) -> Error {
        let path = path.to_owned();
        match self {
            Self::Damaged(fact) => Error::Damaged { path, fact },
            Self::Unsupported(fact) => Error::Unsupported { path, fact },
            Self::Forbidden(global) => Error::ForbiddenGlobal { path, global },
            Self::Io(source) => Error::Io { doing: "read", path, source },
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

/// libtorch refuses only what the checks before should have refused: an absurd shape, no memory.
impl From<tch::TchError> for Fault {
    fn from(error: tch::TchError) -> Self {
        Self::damaged(format_args!("libtorch refuses a tensor of it: {error}"))
    }
}
