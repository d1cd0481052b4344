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
    /// A file is damaged, or of another kind than expected.
    #[error("{} is damaged or of another kind: {detail}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where, and what is wrong.
        detail: String,
    },
    /// A pickle cannot be read as a list of strings.
    #[error(transparent)]
    Pickle(#[from] brigade_checkpoint::Error),
    /// A text is not UTF-8.
    #[error(
        "{name} is not UTF-8: the byte at offset {offset} cannot be there; convert it, for example with `iconv -t \
         UTF-8`, or leave it out"
    )]
    NotUtf8 {
        /// The file, and the row and column where it has several texts.
        name: String,
        /// The offset of the first byte that cannot be there, from the start of the file, or of the text where `name`
        /// has a row.
        offset: u64,
    },
    /// A table has no such column.
    #[error("{} has no column {column:?}; its columns are {columns:?}", path.display())]
    MissingColumn {
        /// The table.
        path: PathBuf,
        /// The column that is asked for.
        column: String,
        /// Those that are there.
        columns: Vec<String>,
    },
    /// A row of a table or of a file of lines cannot be used.
    #[error("{}, line {line}: {detail}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The column, and what is wrong.
        detail: String,
    },
    /// There are no texts.
    #[error("{name} has no texts: {detail}")]
    NoTexts {
        /// The file, folder or list.
        name: String,
        /// What was looked for.
        detail: String,
    },
    /// A text could not be split into tokens.
    #[error("{name}: {source}")]
    Text {
        /// The text: its file, its row, or its number from 0.
        name: String,
        /// What is wrong.
        source: Box<Self>,
    },
    /// A tokenizer of Hugging Face's refuses its file, a text, or ids.
    #[error("the tokenizer refuses: {0}")]
    Refused(String),
    /// The tokenizer panicked.
    #[error("the tokenizer panicked: {0}; leave the text out and report the tokenizer's fault")]
    Panicked(String),
    /// A token that a vocabulary neither has nor has a number for.
    #[error(
        "the vocabulary has no token {token:?} and no unknown token that would stand for it; name one with \
         `with_unknown`"
    )]
    UnknownToken {
        /// The token.
        token: String,
    },
    /// A call that its documentation excludes.
    #[error("{0}")]
    InvalidArgument(String),
}

/// A result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;
