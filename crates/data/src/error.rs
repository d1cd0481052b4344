//! What can go wrong with data: one enum of facts, by fault.

use std::io;

/// Why a batch could not be made, or a loader's options do not fit.
///
/// Display is one line that names both sides of a mismatch. The cause is part of that line, so
/// `source()` is empty and a printed chain says nothing twice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    // ---- datasets ----
    /// A dataset was asked for a sample that it does not have.
    #[error("sample {index} was asked for, but the dataset holds {len} samples")]
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
    /// A sampler or a sharding rule refused its input.
    #[error(transparent)]
    Plan(#[from] brigade_sampling::PlanError),
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
        cause: Box<Self>,
    },
    /// An error of libtorch.
    #[error(transparent)]
    Torch(#[from] brigade_torch::Error),
    /// An error of a data set's own kind, such as `brigade_datasets::DatasetError`.
    #[error("{0}")]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl DataError {
    /// Wraps the error of a dataset's own kind, or a plain message.
    ///
    /// ```
    /// use brigade_data::DataError;
    ///
    /// let error = DataError::other("the tape is torn");
    /// assert_eq!(error.to_string(), "the tape is torn");
    /// ```
    pub fn other(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(cause.into())
    }
}

impl From<tch::TchError> for DataError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}
