//! What can go wrong with texts and tokens.

use std::path::PathBuf;

/// What can go wrong with texts and tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A call that its documentation excludes.
    #[error("{0}")]
    InvalidArgument(String),
}

/// A result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;
