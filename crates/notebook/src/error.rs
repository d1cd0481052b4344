//! Errors of a launch from a notebook.

use std::fmt;
use std::io;
use std::path::PathBuf;

use brigade_dylib_call::EntryError;

/// Reason why a launch from a notebook failed.
///
/// `Debug` shows the message, because notebooks print the `Debug` text of an error that a cell ends with.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum NotebookError {
    /// The function is a closure: the ranks load it from the cell's library, which has none of its captured variables.
    #[error(
        "{function} is not a plain function: the ranks are other processes without the \
         notebook's variables; write a `fn` and pass what it needs as arguments"
    )]
    NotAFunction {
        /// Name of the type that was passed.
        function: &'static str,
    },
    /// A setting is out of range, or two of them contradict each other.
    #[error("{0}")]
    Setting(String),
    /// The cell's process is already a rank.
    #[error(
        "this process is {world} already: the launcher is for the notebook's own process, call the training function \
         itself here"
    )]
    InsideARank {
        /// Rank and world size of the process.
        world: String,
    },
    /// The function's library has no name by which other processes can load it.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// The function is in a program, and not in a library that a notebook has compiled.
    #[error(
        "the function is in the program {}, which other processes cannot load as they load a notebook's cells: run \
         the program under `brigade launch`", program.display()
    )]
    InAProgram {
        /// Path of the program.
        program: PathBuf,
    },
    /// The program that starts the ranks is missing.
    #[error(
        "cannot find the program `brigade`, which starts the ranks, {looked}: install it with `cargo install --path \
         crates/cli` in a checkout of Brigade"
    )]
    NoProgram {
        /// Description of the places that were searched.
        looked: String,
    },
    /// The program that starts the ranks cannot run, or has another version.
    #[error("{} {reason}", program.display())]
    Program {
        /// Path of the program.
        program: PathBuf,
        /// Description of the failure.
        reason: String,
    },
    /// An argument or a result cannot be sent to another process.
    #[error("cannot send {what} to another process: {reason}")]
    Message {
        /// Name of the value: `the arguments`, or `the result of rank 1`.
        what: String,
        /// Error message of serde.
        reason: String,
    },
    /// An operation of the operating system failed.
    #[error("cannot {what}: {source}")]
    System {
        /// Description of the operation.
        what: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The function failed in the notebook's own process.
    #[error("{0}")]
    Function(String),
    /// A rank failed, and the others were stopped.
    #[error("{message}")]
    Failed {
        /// Error message, with the rank that failed.
        message: String,
        /// Rank that failed. `None` if no rank failed by itself.
        rank: Option<usize>,
    },
}

impl fmt::Debug for NotebookError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl NotebookError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        |source| Self::System { what: what.into(), source }
    }

    pub(crate) fn message(what: impl Into<String>, reason: impl fmt::Display) -> Self {
        Self::Message { what: what.into(), reason: reason.to_string() }
    }
}
