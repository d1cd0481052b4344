//! Errors of plots.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::counted;

/// Error of creating, rendering or saving a plot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// An image has more pixels than the limit.
    #[error(
        "the plot has {width} x {height} pixels, more than the limit of {most} in all: make it \
         smaller, or plot less at once"
    )]
    TooLarge {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Maximum number of pixels.
        most: u64,
    },
    /// A matrix has another number of values than its size.
    #[error("a matrix of {rows} x {columns} cannot be made of {found} values")]
    Matrix {
        /// Number of rows.
        rows: usize,
        /// Number of columns.
        columns: usize,
        /// Number of values that were given.
        found: usize,
    },
    /// The number of labels is not the number of the matrix's rows or columns.
    #[error("{} given for {expected} {of} of the matrix: one each, or none", counted(.found, "label"))]
    Labels {
        /// Dimension that was labelled: "rows" or "columns".
        of: &'static str,
        /// Number of rows or columns.
        expected: usize,
        /// Number of labels that were given.
        found: usize,
    },
    /// An image's number of bytes does not match its size.
    #[error(
        "an image of {width} x {height} pixels has {expected} bytes, but {found} were given; expected 3 \
        bytes per pixel for colour images, or 1 for grey images"
    )]
    Image {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Number of bytes that the size requires.
        expected: u64,
        /// Number of bytes that were given.
        found: u64,
    },
    /// A file name has another extension than the supported ones.
    #[error("unknown kind of file: {path} does not end in .png, .svg or .txt", path = .path.display())]
    Extension {
        /// Path of the file.
        path: PathBuf,
    },
    /// A file could not be written.
    #[error("cannot write the plot {path}: {source}", path = .path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The PNG encoder failed.
    #[error("cannot encode the plot as PNG: {0}")]
    Encode(#[from] png::EncodingError),
}
