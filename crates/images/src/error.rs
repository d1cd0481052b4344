//! What can go wrong with images.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::{counted, escaped};

/// The result of a function of this crate.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;

/// Why images could not be found, read or transformed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The system could not read a file or a folder.
    #[error("cannot read {}: {cause}", escaped(path.display()))]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        cause: io::Error,
    },
    /// The bytes of an image could not be decoded.
    #[error("cannot decode {name}: {detail}", detail = escaped(detail), name = escaped(name))]
    Decode {
        /// The image's path, or its name in an archive.
        name: String,
        /// The format, as far as it is known, and what is wrong.
        detail: String,
    },
    /// An image has more pixels than the limit allows.
    #[error(
        "{name} has {width} x {height} pixels, more than the limit of {limit} in all; leave it out, \
         or raise `max_pixels`",
        name = escaped(name)
    )]
    TooLarge {
        /// The image's path, or its name in an archive.
        name: String,
        /// Its width in pixels.
        width: u32,
        /// Its height in pixels.
        height: u32,
        /// The limit.
        limit: u64,
    },
    /// An archive or a table cannot be read as what it should be.
    #[error("{} is damaged or in another format: {detail}", escaped(path.display()), detail = escaped(detail))]
    Format {
        /// The file.
        path: PathBuf,
        /// Where, and what is wrong.
        detail: String,
    },
    /// The name of an image does not tell its label.
    #[error("{name} has no label: {detail}", detail = escaped(detail), name = escaped(name))]
    NoLabel {
        /// The image's path, or its name in an archive.
        name: String,
        /// What was looked for.
        detail: String,
    },
    /// A label is none of the classes.
    #[error("the label {label:?} is not among the {}: {known}", counted(classes, "class"), known = escaped(known))]
    UnknownLabel {
        /// The label.
        label: String,
        /// The number of classes.
        classes: usize,
        /// Some of them.
        known: String,
    },
    /// A value that was given cannot be used.
    #[error("{}", escaped(.0))]
    InvalidArgument(String),
}
