//! Errors of reading, decoding and transforming images.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::{counted, escaped};

/// The result of a function of this crate.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;

/// Reason why images could not be found, read or transformed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The system could not read a file or a folder.
    #[error("cannot read {}: {cause}", escaped(path.display()))]
    Read {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the system.
        cause: io::Error,
    },
    /// The bytes of an image could not be decoded.
    #[error("cannot decode {name}: {detail}", detail = escaped(detail), name = escaped(name))]
    Decode {
        /// Path of the image, or its name in an archive.
        name: String,
        /// Format, if it is known, and description of the fault.
        detail: String,
    },
    /// An image has more pixels than the limit allows.
    #[error(
        "{name} has {width} x {height} pixels, more than the limit of {limit} in all; leave it out, \
         or raise `max_pixels`",
        name = escaped(name)
    )]
    TooLarge {
        /// Path of the image, or its name in an archive.
        name: String,
        /// Width of the image in pixels.
        width: u32,
        /// Height of the image in pixels.
        height: u32,
        /// Maximum number of pixels.
        limit: u64,
    },
    /// An archive or a table is damaged or has another format.
    #[error("{} is damaged or in another format: {detail}", escaped(path.display()), detail = escaped(detail))]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// Position and description of the fault.
        detail: String,
    },
    /// No label can be found for an image.
    #[error("{name} has no label: {detail}", detail = escaped(detail), name = escaped(name))]
    NoLabel {
        /// Path of the image, or its name in an archive.
        name: String,
        /// Reason why no label was found.
        detail: String,
    },
    /// A label is not among the classes.
    #[error("the label {label:?} is not among the {}: {known}", counted(classes, "class"), known = escaped(known))]
    UnknownLabel {
        /// The label that is not among the classes.
        label: String,
        /// Number of known classes.
        classes: usize,
        /// Names of some of the classes.
        known: String,
    },
    /// An argument cannot be used; the text contains the reason.
    #[error("{}", escaped(.0))]
    InvalidArgument(String),
}
