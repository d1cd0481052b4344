//! Errors of trackers.

use std::io;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::{counted, escaped};

/// Error of a tracker or of [`reader`](crate::reader).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackError {
    /// A file could not be written or read.
    #[error("{action} {path}: {source}", path = escaped(.path.display()))]
    File {
        /// Action that failed, as the message begins.
        action: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file of an earlier run was not written by this tracker.
    #[error(
        "{path} is not a file of this tracker ({reason}): choose another project or folder, or move it away",
        path = escaped(.path.display())
    )]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Difference that was found.
        reason: String,
    },
    /// A folder contains no run.
    #[error(
        "{folder} contains no run: expected a .jsonl file of the tracker JsonLines",
        folder = escaped(.folder.display())
    )]
    NoRun {
        /// Path of the folder.
        folder: PathBuf,
    },
    /// A project's name cannot be a file name.
    #[error(
        "the project {project:?} cannot be a file name: use a name that is not empty, has no / and does \
        not begin with a dot"
    )]
    Project {
        /// Name of the project.
        project: String,
    },
    /// A name is reserved for a column that the tracker writes itself.
    #[error(
        "{name:?} is a column that the tracker writes itself: log the value under another name"
    )]
    Reserved {
        /// Name that is reserved.
        name: String,
    },
    /// A tracker was called before `start` or after `finish`.
    #[error("the tracker {tracker} has no run: start it first, and log nothing after finish")]
    NotStarted {
        /// Name of the tracker.
        tracker: String,
    },
    /// A tracker cannot store this kind of value.
    #[error("the tracker {tracker} does not support {what}: log it to another tracker")]
    Unsupported {
        /// Name of the tracker.
        tracker: String,
        /// Kind of value that was logged.
        what: &'static str,
    },
    /// An image's number of bytes does not match its size.
    #[error(
        "an image of {width} x {height} pixels in {channels} channels has {expected} bytes, and {found} were given; channels are 1, 3 or 4"
    )]
    Image {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Bytes per pixel.
        channels: u8,
        /// Number of bytes that the size requires.
        expected: u64,
        /// Number of bytes that were given.
        found: u64,
    },
    /// A row's number of cells is not the table's number of columns.
    #[error(
        "row {row} of the table has {}, but the table has {}",
        counted(.found, "cell"),
        counted(.expected, "column")
    )]
    Row {
        /// Index of the row, from 0.
        row: usize,
        /// Number of columns.
        expected: usize,
        /// Number of cells.
        found: usize,
    },
    /// A configuration cannot be written as JSON.
    #[error("the run's configuration cannot be written as JSON: {reason}")]
    Config {
        /// Message of the serialiser.
        reason: String,
    },
    /// An address is not valid.
    #[error(
        "{url:?} is not the address of an MLflow server: {reason}; expected a URL such as http://host:5000"
    )]
    Address {
        /// Address that was given, without credentials.
        url: String,
        /// Reason why it is not valid.
        reason: String,
    },
    /// The server does not answer.
    #[error(
        "the MLflow server at {url} does not answer: {reason}; start it, or leave the tracker out"
    )]
    Unreachable {
        /// Address of the server.
        url: String,
        /// Error of the last attempt.
        reason: String,
    },
    /// An encrypted connection could not be made.
    #[error(
        "the MLflow server at {url} is not trusted: {reason}; set the certificate of its authority by \
         MLFLOW_TRACKING_SERVER_CERT_PATH or Mlflow::certificate"
    )]
    Untrusted {
        /// Address of the server.
        url: String,
        /// Error of the server's certificate, or of the TLS connection.
        reason: String,
    },
    /// A file contains no usable certificate.
    #[error("{path} holds no certificates in PEM that can be used: {reason}", path = escaped(.path.display()))]
    Certificate {
        /// Path of the file.
        path: PathBuf,
        /// Reason why it cannot be used.
        reason: String,
    },
    /// The server refused a request.
    #[error("the MLflow server at {url} refuses {what} with status {status}: {reason}")]
    Refused {
        /// Address of the server.
        url: String,
        /// Subject of the request.
        what: &'static str,
        /// HTTP status code.
        status: u16,
        /// Message of the server.
        reason: String,
    },
    /// The server requires other credentials.
    #[error(
        "the MLflow server at {url} does not let this program send {what} (status {status}: {reason}); set \
         MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or call \
         Mlflow::credentials"
    )]
    Unauthorized {
        /// Address of the server.
        url: String,
        /// Subject of the request.
        what: &'static str,
        /// HTTP status code, 401 or 403.
        status: u16,
        /// Message of the server.
        reason: String,
    },
    /// An answer does not have the form of MLflow's.
    #[error(
        "the server at {url} answers {what} differently from MLflow ({reason}): check that it is an MLflow server"
    )]
    NotMlflow {
        /// Address of the server.
        url: String,
        /// Subject of the request.
        what: &'static str,
        /// Difference from the expected answer.
        reason: String,
    },
    /// Logged values did not reach the server.
    #[error(
        "the MLflow server at {url} did not receive {}; the last error: {reason}",
        counted(.lost, "value")
    )]
    Lost {
        /// Address of the server.
        url: String,
        /// Number of values that were lost.
        lost: u64,
        /// Last error, as a message.
        reason: String,
    },
    /// An error of a user-defined tracker.
    #[error("{0}")]
    Own(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl TrackError {
    /// Adds the action and the path to an error of the operating system.
    pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }
}
