//! What can go wrong with the files of a data set, and with fetching them.

use std::io;
use std::path::PathBuf;

use brigade_rank_env::text::counted;
use brigade_torch::{Error, ErrorKind};

/// Why the files of a data set could not be read or fetched.
///
/// Functions of this crate give it as the detail of an [`Error`], which a training loop's `?` takes:
///
/// ```
/// use brigade_datasets::{DatasetError, FashionMnist};
///
/// let error = FashionMnist::train("no/such/folder").unwrap_err();
/// assert!(matches!(error.downcast_ref(), Some(DatasetError::NotFound { .. })));
/// ```
///
/// Display is one line that names both sides of a mismatch. The cause is part of that line, so
/// `source()` is empty and a printed chain says nothing twice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatasetError {
    // ---- files ----
    /// The file or folder could not be opened or read.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The file or folder could not be written.
    #[error("cannot write {path}: {cause}{}", needed(*.bytes))]
    Write {
        /// What was written.
        path: PathBuf,
        /// Size of the whole file; 0 where it is not known.
        bytes: u64,
        /// What the system said.
        cause: io::Error,
    },
    /// A file of zero bytes.
    #[error("{path} is empty: expected an IDX file; fetch it again")]
    EmptyFile {
        /// The file.
        path: PathBuf,
    },
    /// The first four bytes are not those of the expected kind of IDX file.
    #[error(
        "{path} is not an IDX file of unsigned bytes in {}: \
         expected magic number {expected:#010x}, found {found:#010x}",
        counted(.dimensions, "dimension")
    )]
    Magic {
        /// The file.
        path: PathBuf,
        /// 3 for images, 1 for labels.
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
        /// The file.
        path: PathBuf,
        /// Bytes that header and data take, uncompressed.
        expected: u64,
        /// Bytes that are there, uncompressed.
        found: u64,
    },
    /// There is more in the file than its header announces.
    #[error(
        "{path} has more than {}, the size that its header declares; fetch it again",
        counted(.expected, "byte")
    )]
    TrailingBytes {
        /// The file.
        path: PathBuf,
        /// Bytes that header and data take, uncompressed.
        expected: u64,
    },
    /// The header announces images without pixels, or more data than a machine can hold.
    #[error("{path} declares the shape {shape:?}, which images or labels cannot have")]
    Shape {
        /// The file.
        path: PathBuf,
        /// The dimensions in its header.
        shape: Vec<usize>,
    },
    /// The gzip stream does not decompress.
    #[error(
        "{path} is a damaged gzip file: {cause}, after {}; fetch it again",
        counted(.found, "good byte")
    )]
    Gzip {
        /// The file.
        path: PathBuf,
        /// Bytes that could be decompressed.
        found: u64,
        /// What the decompressor said.
        cause: io::Error,
    },
    /// A small gzip file that would become a very large one.
    #[error(
        "{path} would take more than {found} bytes of memory, far more than images and labels of its \
         size; unpack it with `gzip -d` if that is intended"
    )]
    Expansion {
        /// The file.
        path: PathBuf,
        /// Bytes that were decompressed.
        found: u64,
    },
    /// A pair of files that do not belong together.
    #[error(
        "{images} holds {}, but {labels} holds {}: the two files do not belong together",
        counted(.image_count, "image"),
        counted(.label_count, "label")
    )]
    CountMismatch {
        /// The file of images.
        images: PathBuf,
        /// How many it holds.
        image_count: usize,
        /// The file of labels.
        labels: PathBuf,
        /// How many it holds.
        label_count: usize,
    },
    /// A label that no class has.
    #[error("{path}: label {label} at position {position}, expected 0 to {}", .classes.saturating_sub(1))]
    Label {
        /// The file of labels.
        path: PathBuf,
        /// The label.
        label: u8,
        /// Its place in the file, from 0.
        position: usize,
        /// How many classes there are.
        classes: usize,
    },
    /// None of the folders holds the file.
    #[error(
        "found neither {file} nor {file}.gz in {}; {advice}",
        .looked_in.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NotFound {
        /// The file's name, without `.gz`.
        file: String,
        /// The folders, in the order of search.
        looked_in: Vec<PathBuf>,
        /// What to do now.
        advice: String,
    },

    // ---- downloads ----
    /// No mirror gave the file.
    #[error("cannot download {file}: {}", .failures.join("; "))]
    Download {
        /// The file's name.
        file: String,
        /// One line for every mirror: its address and why it failed.
        failures: Vec<String>,
    },
    /// An address from which no file can come.
    #[error("cannot download {url:?}: {reason}")]
    InvalidUrl {
        /// The address.
        url: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// There is no folder for downloads.
    #[error("this user has no home folder for downloads: set FASTAI_HOME, or name a folder")]
    NoHome,

    // ---- archives ----
    /// The file is of another kind.
    #[error("{path} is not a tar, tar.gz or zip archive: found {found}; fetch it again")]
    NotAnArchive {
        /// The file.
        path: PathBuf,
        /// What was found in it.
        found: String,
    },
    /// The archive cannot be read to its end.
    #[error(
        "{path} is a damaged archive: {cause}, after {}; fetch it again",
        counted(.entries, "good entry")
    )]
    DamagedArchive {
        /// The archive.
        path: PathBuf,
        /// How many entries could be read.
        entries: u64,
        /// What its reader said.
        cause: io::Error,
    },
    /// The archive holds what could do harm, or what no data set needs.
    #[error("{path}: the entry {entry:?} is refused: {reason}; nothing was unpacked")]
    Refused {
        /// The archive.
        path: PathBuf,
        /// The entry's name.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The archive becomes larger than allowed.
    #[error(
        "{path} holds more than {limit} {unit}, too many for its size; nothing was unpacked: \
         allow more by `{option}` if you trust it"
    )]
    ArchiveTooLarge {
        /// The archive.
        path: PathBuf,
        /// How much is allowed.
        limit: u64,
        /// Of what: `bytes` or `files`.
        unit: &'static str,
        /// The option of `Extraction` and `UntarData` that sets the limit.
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
