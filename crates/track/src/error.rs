//! What can go wrong with a tracker.

use std::io;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::{counted, escaped};

/// A tracker that cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackError {
    /// A file could not be written or read.
    #[error("{action} {path}: {source}", path = escaped(.path.display()))]
    File {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file of an earlier run is none that this tracker has written.
    #[error(
        "{path} is not a file of this tracker ({reason}): choose another project or folder, or move it away",
        path = escaped(.path.display())
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// A folder in which no run was found.
    #[error(
        "{folder} holds no run: a run is a file .jsonl, as the tracker JsonLines writes it",
        folder = escaped(.folder.display())
    )]
    NoRun {
        /// The folder.
        folder: PathBuf,
    },
    /// A project whose name makes no file.
    #[error(
        "the project {project:?} names no file: use a name that is not empty, has no / and does not begin with a dot"
    )]
    Project {
        /// The name.
        project: String,
    },
    /// A name that the tracker writes itself.
    #[error(
        "{name:?} is a column that the tracker writes itself: log the value under another name"
    )]
    Reserved {
        /// The name.
        name: String,
    },
    /// A call before `start` or after `finish`.
    #[error("the tracker {tracker} has no run: start it first, and log nothing after finish")]
    NotStarted {
        /// The tracker.
        tracker: String,
    },
    /// What this tracker has no place for.
    #[error("the tracker {tracker} has no place for {what}: log it to another tracker")]
    Unsupported {
        /// The tracker.
        tracker: String,
        /// What was logged.
        what: &'static str,
    },
    /// An image whose bytes do not fit its size.
    #[error(
        "an image of {width} x {height} pixels in {channels} channels has {expected} bytes, and {found} were given; channels are 1, 3 or 4"
    )]
    Image {
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
        /// Bytes of a pixel.
        channels: u8,
        /// Bytes that there should be.
        expected: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// A row of another length than the table has columns.
    #[error(
        "row {row} of the table has {}, and the table {}",
        counted(.found, "cell"),
        counted(.expected, "column")
    )]
    Row {
        /// The row, from 0.
        row: usize,
        /// Columns.
        expected: usize,
        /// Cells.
        found: usize,
    },
    /// A configuration that cannot be written down.
    #[error("the run's configuration cannot be written as JSON: {reason}")]
    Config {
        /// Why.
        reason: String,
    },
    /// An address that is not valid.
    #[error(
        "{url:?} is not the address of an MLflow server: {reason}; it is like http://host:5000"
    )]
    Address {
        /// What was given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No answer.
    #[error(
        "the MLflow server at {url} does not answer: {reason}; start it, or leave the tracker out"
    )]
    Unreachable {
        /// Its address.
        url: String,
        /// The last attempt's error.
        reason: String,
    },
    /// No encrypted connection.
    #[error(
        "the MLflow server at {url} is not trusted: {reason}; name the certificate that signed the \
         server's with MLFLOW_TRACKING_SERVER_CERT_PATH or Mlflow::certificate"
    )]
    Untrusted {
        /// Its address.
        url: String,
        /// What is wrong with its certificate, or with its side of TLS.
        reason: String,
    },
    /// A file that should hold certificates.
    #[error("{path} holds no certificates in PEM that can be used: {reason}", path = escaped(.path.display()))]
    Certificate {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// An answer that refuses.
    #[error("the MLflow server at {url} refuses {what} with status {status}: {reason}")]
    Refused {
        /// Its address.
        url: String,
        /// What was asked.
        what: &'static str,
        /// The HTTP status.
        status: u16,
        /// What it says.
        reason: String,
    },
    /// An answer that asks for other credentials.
    #[error(
        "the MLflow server at {url} does not let this program send {what} (status {status}: {reason}); set \
         MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or call \
         Mlflow::credentials"
    )]
    Unauthorized {
        /// Its address.
        url: String,
        /// What was asked.
        what: &'static str,
        /// The HTTP status, 401 or 403.
        status: u16,
        /// What it says.
        reason: String,
    },
    /// An answer of another shape.
    #[error(
        "the server at {url} answers {what} with something else than MLflow does ({reason}): is it one?"
    )]
    NotMlflow {
        /// Its address.
        url: String,
        /// What was asked.
        what: &'static str,
        /// What was expected.
        reason: String,
    },
    /// Points that never arrived.
    #[error(
        "the MLflow server at {url} has not got {}; the last error: {reason}",
        counted(.lost, "value")
    )]
    Lost {
        /// Its address.
        url: String,
        /// How many.
        lost: u64,
        /// Why.
        reason: String,
    },
    /// An error of a tracker of the user's own.
    #[error("{0}")]
    Own(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl TrackError {
    /// Names the file in an error of the system.
    pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }
}
