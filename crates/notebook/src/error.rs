//! What goes wrong in a launch from a notebook.

use std::fmt;
use std::io;
use std::path::PathBuf;

use brigade_dylib_call::EntryError;

/// Why a launch from a notebook failed.
///
/// `Debug` shows the message, because that is what a notebook prints of an error that a cell ends with.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum NotebookError {
    /// The ranks load the function from the cell's library, which has none of what a closure holds.
    #[error(
        "{function} is not a function of its own: the ranks are other processes, which have none of the notebook's \
         variables. Write a `fn` and pass what it needs as arguments"
    )]
    NotAFunction {
        /// The type that was given.
        function: &'static str,
    },
    /// A setting out of range, or two that contradict each other.
    #[error("{0}")]
    Setting(String),
    /// The cell's process is a rank already.
    #[error(
        "this process is {world} already: the launcher is for the notebook's own process, call the training function \
         itself here"
    )]
    InsideARank {
        /// Its place.
        world: String,
    },
    /// The function's library cannot be named for other processes.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// The function is in a program, and not in a library that a notebook has compiled.
    #[error(
        "the function is in the program {}, which other processes cannot load as they load a notebook's cells: run \
         the program under `brigade launch`", program.display()
    )]
    InAProgram {
        /// The program.
        program: PathBuf,
    },
    /// The program that starts the ranks is missing.
    #[error(
        "cannot find the program `brigade`, which starts the ranks, {looked}: install it with `cargo install --path \
         crates/cli` in a checkout of Brigade"
    )]
    NoProgram {
        /// Where it was looked for.
        looked: String,
    },
    /// The program that starts the ranks cannot run, or is of another version.
    #[error("{} {reason}", program.display())]
    Program {
        /// The program.
        program: PathBuf,
        /// What it did.
        reason: String,
    },
    /// An argument or a result cannot be sent to another process.
    #[error("cannot send {what} to another process: {reason}")]
    Message {
        /// `the arguments`, `the result of rank 1`.
        what: String,
        /// serde's answer.
        reason: String,
    },
    /// The system refused.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The function failed where it was called in the notebook's own process.
    #[error("{0}")]
    Function(String),
    /// A rank failed, and the others were stopped.
    #[error("{message}")]
    Failed {
        /// Which rank failed, and its error.
        message: String,
        /// The rank, where one failed by itself.
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
