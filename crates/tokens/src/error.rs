//! Errors of operations on texts and tokens.

use std::path::PathBuf;

use brigade_rank_env::text::escaped;

/// Error of an operation on texts or tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{}: {source}", escaped(path.display()))]
    Io {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file is damaged, or has another format than expected.
    #[error("{} is damaged or in another format: {detail}", escaped(path.display()), detail = escaped(detail))]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// Position and description of the damage.
        detail: String,
    },
    /// A pickle cannot be read as a list of strings.
    #[error(transparent)]
    Pickle(#[from] brigade_checkpoint::Error),
    /// A text is not UTF-8.
    #[error(
        "{name} is not UTF-8: the byte at offset {offset} cannot be there; convert it, for example with `iconv -t \
         UTF-8`, or leave it out",
        name = escaped(name)
    )]
    NotUtf8 {
        /// Name of the file, with row and column if it has several texts.
        name: String,
        /// Offset of the first invalid byte, from the start of the file, or of the text if `name` has a row.
        offset: u64,
    },
    /// A table has no such column.
    #[error("{} has no column {column:?}; its columns are {columns:?}", escaped(path.display()))]
    MissingColumn {
        /// Path of the table.
        path: PathBuf,
        /// Name of the missing column.
        column: String,
        /// Names of the table's columns.
        columns: Vec<String>,
    },
    /// A row of a table or of a file of lines cannot be used.
    #[error("{}, line {line}: {detail}", escaped(path.display()), detail = escaped(detail))]
    Row {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Name of the column, and the problem.
        detail: String,
    },
    /// A file, folder or list has no texts.
    #[error("{name} has no texts: {detail}", detail = escaped(detail), name = escaped(name))]
    NoTexts {
        /// Name of the file, folder or list.
        name: String,
        /// Description of the texts that were searched for.
        detail: String,
    },
    /// A text could not be split into tokens.
    #[error("{name}: {source}", name = escaped(name))]
    Text {
        /// Name of the text: its file, its row, or its index.
        name: String,
        /// Error of the tokenizer.
        source: Box<Self>,
    },
    /// A Hugging Face tokenizer rejected its file, a text, or ids.
    #[error("the tokenizer failed: {}", escaped(.0))]
    Refused(String),
    /// The tokenizer panicked, with this message.
    #[error("the tokenizer panicked: {}; leave the text out and report the tokenizer's fault", escaped(.0))]
    Panicked(String),
    /// The vocabulary has neither the token nor an unknown token.
    #[error(
        "the vocabulary has no token {token:?} and no unknown token that would stand for it; name one with \
         `with_unknown`"
    )]
    UnknownToken {
        /// Token that the vocabulary lacks.
        token: String,
    },
    /// A call violates its documented requirements.
    #[error("{}", escaped(.0))]
    InvalidArgument(String),
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_holds_is_escaped() {
        let utf_16 = "t\0e\0x\0t\0\x1b[2J".to_owned();
        let path = PathBuf::from("a\nb.csv");
        let shown = [
            Error::MissingColumn {
                path: path.clone(),
                column: "text".to_owned(),
                columns: vec![utf_16.clone()],
            },
            Error::Row { path, line: 1, detail: utf_16.clone() },
            Error::NoTexts { name: utf_16.clone(), detail: utf_16.clone() },
            Error::InvalidArgument(utf_16),
        ]
        .map(|error| error.to_string());
        assert!(shown[1].starts_with("a\\nb.csv, line 1: t\\0e"), "{}", shown[1]);
        assert!(!shown.concat().contains(char::is_control), "{shown:?}");
    }
}
