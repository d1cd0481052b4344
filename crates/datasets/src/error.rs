//! Errors of reading and downloading the files of a dataset.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::counted;
use brigade_torch::{Error, ErrorKind};

/// Reason why the files of a dataset could not be read or downloaded.
///
/// Functions of this crate return it as the detail of an [`Error`], which the `?` of a training loop accepts:
///
/// ```
/// use brigade_datasets::{DatasetError, FashionMnist};
///
/// let error = FashionMnist::train("no/such/folder").unwrap_err();
/// assert!(matches!(error.downcast_ref(), Some(DatasetError::NotFound { .. })));
/// ```
///
/// Its text is one line that names both sides of a mismatch. The cause is part of that line, so that `source()` is
/// empty and a printed chain does not repeat it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatasetError {
    // ---- files ----
    /// The file or folder could not be opened or read.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the system.
        cause: io::Error,
    },
    /// The file or folder could not be written.
    #[error("cannot write {path}: {cause}{}", needed(*.bytes))]
    Write {
        /// Path of the file or folder.
        path: PathBuf,
        /// Size of the whole file in bytes; 0 if it is not known.
        bytes: u64,
        /// Error of the system.
        cause: io::Error,
    },
    /// The file has zero bytes.
    #[error("{path} is empty: expected an IDX file; fetch it again")]
    EmptyFile {
        /// Path of the file.
        path: PathBuf,
    },
    /// The first four bytes are not those of the expected kind of IDX file.
    #[error(
        "{path} is not an IDX file of unsigned bytes in {}: \
         expected magic number {expected:#010x}, found {found:#010x}",
        counted(.dimensions, "dimension")
    )]
    Magic {
        /// Path of the file.
        path: PathBuf,
        /// Number of dimensions: 3 for images, 1 for labels.
        dimensions: usize,
        /// The magic number that was expected.
        expected: u32,
        /// The magic number of the file.
        found: u32,
    },
    /// The file ends before its data does.
    #[error(
        "{path} is truncated: expected {}, found {found}; fetch it again",
        counted(.expected, "byte")
    )]
    Truncated {
        /// Path of the file.
        path: PathBuf,
        /// Size of header and data in bytes, uncompressed.
        expected: u64,
        /// Number of bytes in the file, uncompressed.
        found: u64,
    },
    /// The file is longer than its header announces.
    #[error(
        "{path} has more than {}, the size that its header declares; fetch it again",
        counted(.expected, "byte")
    )]
    TrailingBytes {
        /// Path of the file.
        path: PathBuf,
        /// Size of header and data in bytes, uncompressed.
        expected: u64,
    },
    /// The header announces images without pixels, or more data than memory can hold.
    #[error("{path} declares the shape {shape:?}, which images or labels cannot have")]
    Shape {
        /// Path of the file.
        path: PathBuf,
        /// Dimensions in the header.
        shape: Vec<usize>,
    },
    /// The gzip stream cannot be decompressed.
    #[error(
        "{path} is a damaged gzip file: {cause}, after {}; fetch it again",
        counted(.found, "good byte")
    )]
    Gzip {
        /// Path of the file.
        path: PathBuf,
        /// Number of bytes that could be decompressed.
        found: u64,
        /// Error of the decompressor.
        cause: io::Error,
    },
    /// A small gzip file that would expand to a very large one.
    #[error(
        "{path} would take more than {found} bytes of memory, far more than images and labels of its \
         size; unpack it with `gzip -d` if that is intended"
    )]
    Expansion {
        /// Path of the file.
        path: PathBuf,
        /// Number of bytes that were decompressed.
        found: u64,
    },
    /// A file of images and a file of labels that differ in their number of samples.
    #[error(
        "{images} holds {}, but {labels} holds {}: the two files do not belong together",
        counted(.image_count, "image"),
        counted(.label_count, "label")
    )]
    CountMismatch {
        /// Path of the file of images.
        images: PathBuf,
        /// Number of images in the first file.
        image_count: usize,
        /// Path of the file of labels.
        labels: PathBuf,
        /// Number of labels in the second file.
        label_count: usize,
    },
    /// A label that is not below the number of classes.
    #[error("{path}: label {label} at position {position}, expected 0 to {}", .classes.saturating_sub(1))]
    Label {
        /// Path of the file of labels.
        path: PathBuf,
        /// The label that is too large.
        label: u8,
        /// Position of the label in the file, from 0.
        position: usize,
        /// Number of known classes.
        classes: usize,
    },
    /// None of the folders contains the file.
    #[error(
        "found neither {file} nor {file}.gz in {}; {advice}",
        .looked_in.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NotFound {
        /// Name of the file, without `.gz`.
        file: String,
        /// Folders in the order of the search.
        looked_in: Vec<PathBuf>,
        /// Advice on how to proceed.
        advice: String,
    },

    // ---- downloads ----
    /// The file could not be downloaded from any mirror.
    #[error("cannot download {file}: {}", .failures.join("; "))]
    Download {
        /// Name of the file.
        file: String,
        /// A line for every mirror: its address and why it failed.
        failures: Vec<String>,
    },
    /// An address that cannot be downloaded from.
    #[error("cannot download {url:?}: {reason}")]
    InvalidUrl {
        /// The address that cannot be downloaded from.
        url: String,
        /// Reason why the address is invalid.
        reason: &'static str,
    },
    /// The user has no home folder for downloads.
    #[error("this user has no home folder for downloads: set FASTAI_HOME, or name a folder")]
    NoHome,

    // ---- archives ----
    /// The file is not a tar, tar.gz or zip archive.
    #[error("{path} is not a tar, tar.gz or zip archive: found {found}; fetch it again")]
    NotAnArchive {
        /// Path of the file.
        path: PathBuf,
        /// Description of the file's content.
        found: String,
    },
    /// The archive cannot be read to its end.
    #[error(
        "{path} is a damaged archive: {cause}, after {}; fetch it again",
        counted(.entries, "good entry")
    )]
    DamagedArchive {
        /// Path of the archive.
        path: PathBuf,
        /// Number of entries that could be read.
        entries: u64,
        /// Error of the reader.
        cause: io::Error,
    },
    /// The archive has an entry that could do harm, or that no dataset needs.
    #[error("{path}: the entry {entry:?} is refused: {reason}; nothing was unpacked")]
    Refused {
        /// Path of the archive.
        path: PathBuf,
        /// Name of the entry.
        entry: String,
        /// Reason why the entry is refused.
        reason: String,
    },
    /// The unpacked archive exceeds a limit.
    #[error(
        "{path} holds more than {limit} {unit}, too many for its size; nothing was unpacked: \
         allow more by `{option}` if you trust it"
    )]
    ArchiveTooLarge {
        /// Path of the archive.
        path: PathBuf,
        /// Value of the limit.
        limit: u64,
        /// Unit of the limit: `bytes` or `files`.
        unit: &'static str,
        /// Option of `Extraction` and `UntarData` that sets the limit.
        option: &'static str,
    },
}

fn needed(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!("; {bytes} bytes are needed there"),
    }
}

impl From<DatasetError> for Error {
    fn from(error: DatasetError) -> Self {
        use DatasetError as D;
        let kind = match error {
            D::Read { .. } | D::Write { .. } | D::NotFound { .. } | D::Download { .. } => {
                ErrorKind::Io
            }
            D::InvalidUrl { .. } => ErrorKind::InvalidArgument,
            D::NoHome => ErrorKind::Environment,
            D::EmptyFile { .. }
            | D::Magic { .. }
            | D::Truncated { .. }
            | D::TrailingBytes { .. }
            | D::Shape { .. }
            | D::Gzip { .. }
            | D::Expansion { .. }
            | D::CountMismatch { .. }
            | D::Label { .. }
            | D::NotAnArchive { .. }
            | D::DamagedArchive { .. }
            | D::Refused { .. }
            | D::ArchiveTooLarge { .. } => ErrorKind::Data,
        };
        Self::new(kind, error)
    }
}
