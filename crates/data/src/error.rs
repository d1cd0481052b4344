//! What can go wrong with data: one enum of facts, by fault.

use std::io;

use brigade_rank_env::text::counted;
use brigade_torch::{Error, ErrorKind, is_out_of_memory_message};

/// Why a batch could not be made, or a loader's options do not fit: the detail of an [`Error`].
///
/// Display is one line that names both sides of a mismatch, and has the cause in it.
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
    /// A dataset was asked for a sample that it does not have.
    #[error("sample {index} is out of range: the dataset has {}", counted(.len, "sample"))]
    Index {
        /// The sample's number.
        index: usize,
        /// How many there are.
        len: usize,
    },
    /// Pixels, sizes or tensors that do not make a dataset.
    #[error("{message}")]
    Unfit {
        /// What does not fit what.
        message: String,
    },
    /// Samples that cannot be stacked into one batch.
    #[error(
        "sample {position} of the batch has {found}, the first has {expected}: \
         samples of one batch must agree; bring them to one size in the dataset"
    )]
    Collate {
        /// Place in the batch, from 0.
        position: usize,
        /// What the first sample has.
        expected: String,
        /// What this one has.
        found: String,
    },
    /// A batch without samples cannot be collated: the shape of its tensors is unknown.
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
        /// What the panic said.
        message: String,
    },
    /// The system refused to start a thread.
    #[error("cannot start loader thread {thread} of {threads}: {cause}; ask for fewer threads")]
    Spawn {
        /// The thread's number, from 1.
        thread: usize,
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        cause: io::Error,
    },
    /// Any error, with the batch at which it was delivered.
    #[error("epoch {epoch}, batch {batch}: {cause}")]
    AtBatch {
        /// The epoch, from 0.
        epoch: u64,
        /// The batch's number in this rank's epoch, from 0.
        batch: usize,
        /// What happened.
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
