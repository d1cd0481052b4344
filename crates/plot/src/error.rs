//! What can go wrong with a plot.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::counted;

/// A plot that cannot be made or kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// A picture with more pixels than memory should hold.
    #[error(
        "the plot has {width} x {height} pixels, and the most are {most} in all: make it smaller, or plot less at once"
    )]
    TooLarge {
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
        /// Pixels that a picture may have.
        most: u64,
    },
    /// A matrix whose values do not fit its size.
    #[error("a matrix of {rows} x {columns} has another number of values than the {found} given")]
    Matrix {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Values.
        found: usize,
    },
    /// Labels of another number than the matrix has rows or columns.
    #[error("{} given for {expected} {of} of the matrix: one each, or none", counted(.found, "label"))]
    Labels {
        /// Rows or columns.
        of: &'static str,
        /// How many there are.
        expected: usize,
        /// How many labels.
        found: usize,
    },
    /// An image whose bytes do not fit its size.
    #[error(
        "an image of {width} x {height} pixels has {expected} bytes, and {found} were given; red, green and blue have one each, grey images one a pixel"
    )]
    Image {
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
        /// Bytes that there should be.
        expected: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// A file whose name does not say what to write.
    #[error("{path} does not end in .png, .svg or .txt, so that the kind of file is unknown", path = .path.display())]
    Extension {
        /// The file.
        path: PathBuf,
    },
    /// A file that could not be written.
    #[error("cannot write the plot {path}: {source}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A picture that the encoder refuses.
    #[error("cannot encode the plot as PNG: {0}")]
    Encode(#[from] png::EncodingError),
}
