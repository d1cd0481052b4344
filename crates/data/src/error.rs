//! Errors of datasets and loaders.

use std::io;

use brigade_rank_env::text::counted;
use brigade_torch::{Error, ErrorKind, is_out_of_memory_message};

/// Reason why a batch could not be made, or why a loader's options do not fit: the detail of an [`Error`].
///
/// Its text is one line that names both sides of a mismatch and contains the cause.
///
/// ```
/// use brigade_data::{DataError, DataLoader, dataset_from_fn};
/// use brigade_torch::{Error, ErrorKind};
///
/// let data = dataset_from_fn(4, |index, _seed| match index {
///     2 => Err(Error::custom("the tape is torn")),
///     index => Ok(index as i64),
/// });
/// let error = DataLoader::new(data).batch_size(2).iter().nth(1).unwrap().unwrap_err();
/// assert_eq!(error.to_string(), "epoch 0, batch 1: the tape is torn");
/// assert_eq!(error.kind(), ErrorKind::Custom);
/// assert!(matches!(error.downcast_ref(), Some(DataError::AtBatch { batch: 1, .. })));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    // ---- datasets ----
    /// A sample was requested whose index is not below the length of the dataset.
    #[error("sample {index} is out of range: the dataset has {}", counted(.len, "sample"))]
    Index {
        /// Index of the sample.
        index: usize,
        /// Number of samples in the dataset.
        len: usize,
    },
    /// Pixels, sizes or tensors that cannot form a dataset.
    #[error("{message}")]
    Unfit {
        /// Both sides of the mismatch.
        message: String,
    },
    /// Samples that cannot be stacked into one batch.
    #[error(
        "sample {position} of the batch has {found}, the first has {expected}: \
         samples of one batch must agree; bring them to one size in the dataset"
    )]
    Collate {
        /// Position of the sample in the batch, from 0.
        position: usize,
        /// Type and shape, length, keys or presence of the first sample.
        expected: String,
        /// Type and shape, length, keys or presence of this sample.
        found: String,
    },
    /// A batch without samples cannot be collated, because the shape of its tensors is unknown.
    #[error("a batch without samples has no shape")]
    EmptyBatch,

    // ---- loaders ----
    /// The options of a loader do not fit together.
    #[error("{message}")]
    Options {
        /// Both sides of the mismatch and what to change.
        message: String,
    },
    /// The dataset or its worker panicked.
    #[error("the dataset panicked: {message}")]
    Panicked {
        /// Message of the panic.
        message: String,
    },
    /// The system could not start a thread.
    #[error("cannot start loader thread {thread} of {threads}: {cause}; ask for fewer threads")]
    Spawn {
        /// Number of the thread, from 1.
        thread: usize,
        /// Number of threads that were requested.
        threads: usize,
        /// Error of the system.
        cause: io::Error,
    },
    /// Any error, with the batch in whose place it was returned.
    #[error("epoch {epoch}, batch {batch}: {cause}")]
    AtBatch {
        /// Number of the epoch, from 0.
        epoch: u64,
        /// Number of the batch in this rank's epoch, from 0.
        batch: usize,
        /// Cause of the error.
        #[source]
        cause: Error,
    },
}

impl From<DataError> for Error {
    fn from(error: DataError) -> Self {
        let kind = match &error {
            DataError::Index { .. }
            | DataError::Unfit { .. }
            | DataError::Collate { .. }
            | DataError::EmptyBatch
            | DataError::Spawn { .. } => ErrorKind::Data,
            DataError::Options { .. } => ErrorKind::InvalidArgument,
            DataError::Panicked { message } if is_out_of_memory_message(message) => {
                ErrorKind::OutOfMemory
            }
            DataError::Panicked { .. } => ErrorKind::Data,
            DataError::AtBatch { cause, .. } => cause.kind(),
        };
        Self::new(kind, error)
    }
}
