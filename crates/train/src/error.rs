//! Errors of a training loop.

mod out_of_memory;

use std::path::PathBuf;
use std::time::Duration;

use brigade_torch::{Error, ErrorKind, Result};

pub(crate) use out_of_memory::MOVE_OF_MODEL;
pub use out_of_memory::{MemoryPlan, OutOfMemory};

/// Errors of the Accelerator and of the objects that it prepared: the detail of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Rank 0 could not serve the store at the port that the launcher set, or that the ranks computed.
    #[error(
        "rank 0 cannot serve the ranks' store on port {port}: set MASTER_PORT to a free port, the \
         same for all ranks"
    )]
    StorePort {
        /// Port of the store.
        port: u16,
        /// Error that libtorch returned.
        source: Error,
    },
    /// The ranks of a later attempt did not meet in the store that a launcher such as torchrun keeps for all attempts.
    #[error(
        "rank {rank} did not {} this attempt of the job within {limit:?}: ranks of Python that failed \
         before their first process group cannot be restarted together with ranks of Brigade; start the \
         job again",
        if *.rank == 0 { "answer in" } else { "come to" }
    )]
    AttemptRank {
        /// Rank that this one waited for.
        rank: usize,
        /// Time for which this rank waited.
        limit: Duration,
    },
    /// A rank of a pipeline failed, or lost the connection to another one.
    #[error("rank {rank} of the pipeline, {action}: {source}")]
    Pipeline {
        /// Rank within the pipeline.
        rank: usize,
        /// Operation that failed, with the stage and the micro-batch, and the rank of the other side of a message.
        action: String,
        /// Error of that operation.
        source: Error,
    },
    /// A GPU ran out of memory.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// A tracker could not write.
    #[error(transparent)]
    Track(#[from] brigade_track::TrackError),
    /// Ranks were given different data sets.
    #[error(
        "the ranks' loaders differ: rank 0 has {expected} samples, rank {rank} has {found}; build \
         the same data set on every rank"
    )]
    LoadersDiffer {
        /// First rank whose data set differs.
        rank: usize,
        /// Number of samples on rank 0.
        expected: i64,
        /// Number of samples on rank `rank`.
        found: i64,
    },
    /// A loader has no batch for any rank.
    #[error(
        "the loader has no batch: expected samples, found {samples} with a batch size of {batch_size}{}; \
         look at the data set's folder and filters",
        if *.samples > 0 { " and `drop_last`" } else { "" }
    )]
    NoBatch {
        /// Number of samples of the data set.
        samples: i64,
        /// Number of samples in a batch.
        batch_size: usize,
    },
    /// A value does not have one row per sample of its batch.
    #[error(
        "expected one row for each of the batch's {expected} samples, found a \
         tensor of shape {found:?}; gather other values with `gather`"
    )]
    Rows {
        /// Number of rows of the batch.
        expected: usize,
        /// Shape of the tensor that was passed.
        found: Vec<i64>,
    },
    /// Some ranks have no batch in a round, so they do not take part in a gather.
    #[error(
        "gather_for_metrics: rank {rank} has no batch in this round, because the batches are uneven; \
         keep `even_batches` on: its duplicates are left out of metrics"
    )]
    UnevenRound {
        /// First rank without a batch.
        rank: usize,
    },
    /// The rank that ran a scope for the others failed.
    #[error("{scope}: rank {rank} failed, so all ranks stop: {reason}")]
    Leader {
        /// Name of the scope, such as `on_main_process`.
        scope: &'static str,
        /// Rank on which the scope failed.
        rank: usize,
        /// Error message of that rank.
        reason: String,
    },
    /// A checkpoint does not fit the prepared objects. Nothing was changed.
    #[error("the checkpoint {} does not fit this program, and nothing was changed: {reason}", path.display())]
    CheckpointMismatch {
        /// Path of the checkpoint folder.
        path: PathBuf,
        /// First difference that was found.
        reason: String,
    },
    /// A checkpoint passed validation but could not be read to its end afterwards: the disk failed, or its files were
    /// changed meanwhile.
    #[error(
        "the checkpoint {} passed validation but could not be read completely, so models and optimizers \
         are partly changed; load it or another checkpoint again, or restart the program: {source}",
        path.display()
    )]
    LoadInterrupted {
        /// Path of the checkpoint folder.
        path: PathBuf,
        /// Error of the read.
        source: Error,
    },
    /// A file could not be written or read.
    #[error("{action} {path}: {source}", path = path.display())]
    File {
        /// Operation that failed, as the beginning of a message that ends with the path: `cannot write`.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The gradients of fp16 were not finite in many consecutive steps.
    #[error(
        "gradients were not finite in so many steps that the loss scale fell to {scale:e}, where \
         gradients of a finite loss do not overflow: the loss itself is infinite or NaN on a rank; check \
         it before backward, lower the learning rate, or train with bf16"
    )]
    NotFinite {
        /// Loss scale at which the run was stopped.
        scale: f64,
    },
    /// A loss was infinite or not a number. See [`crate::AcceleratorBuilder::check_loss`].
    #[error(
        "{}, {}",
        not_finite(*rank, *step),
        if *.weights_corrupted {
            "and so are weights by now; load an earlier checkpoint, and lower the learning rate or clip \
             the gradients"
        } else {
            "and no weight was changed; look at the batch and the learning rate, clip the gradients, or \
             leave the batch out on all ranks with `zero_grad`"
        }
    )]
    LossNotFinite {
        /// Rank that had the loss; if several had, the first that reported it. `None` if no rank did: a gradient
        /// overflowed under a finite loss, or the rank runs another program, such as PyTorch's.
        rank: Option<usize>,
        /// Number of the optimizer step that the gradients are for, from 1. `None` if no prepared optimizer makes it.
        step: Option<u64>,
        /// `true` if weights of a prepared optimizer are not finite either, so that leaving out the batch does not
        /// help: gradients of an earlier step had overflowed, or, on a GPU, the step was made before the loss was
        /// known.
        weights_corrupted: bool,
    },
    /// The norm of the gradients is infinite or not a number.
    #[error(
        "the {norm_type}-norm of the gradients is {norm}, so they cannot be clipped; look at the loss, \
         or turn error_if_nonfinite off"
    )]
    GradientNorm {
        /// Norm of the gradients.
        norm: f64,
        /// Exponent p of the p-norm.
        norm_type: f64,
    },
    /// No batch size fits into memory.
    #[error(
        "find_executable_batch_size: memory ran out with every batch size from {start} down to \
         {smallest}; the model itself may not fit"
    )]
    NoBatchSize {
        /// Batch size that was tried first.
        start: usize,
        /// Batch size that was tried last.
        smallest: usize,
    },
}

impl From<TrainError> for Error {
    fn from(error: TrainError) -> Self {
        use TrainError as T;
        let kind = match &error {
            T::Pipeline { source, .. } => source.kind(),
            T::StorePort { .. } => ErrorKind::Environment,
            T::AttemptRank { .. } | T::Leader { .. } => ErrorKind::Communication,
            T::OutOfMemory(_) | T::NoBatchSize { .. } => ErrorKind::OutOfMemory,
            T::Track(_) => ErrorKind::Tracker,
            T::LoadersDiffer { .. } | T::UnevenRound { .. } => ErrorKind::RanksDiffer,
            T::NoBatch { .. } => ErrorKind::Data,
            T::Rows { .. } => ErrorKind::InvalidArgument,
            T::CheckpointMismatch { .. } => ErrorKind::Checkpoint,
            T::LoadInterrupted { source, .. } if source.is_out_of_memory() => {
                ErrorKind::OutOfMemory
            }
            T::LoadInterrupted { .. } => ErrorKind::Checkpoint,
            T::File { .. } => ErrorKind::Io,
            T::NotFinite { .. } | T::LossNotFinite { .. } | T::GradientNorm { .. } => {
                ErrorKind::NotFinite
            }
        };
        Self::new(kind, error)
    }
}

/// Returns `true` if a loss was infinite or NaN.
pub(crate) fn loss_is_not_finite<T>(outcome: &Result<T>) -> bool {
    let found = outcome.as_ref().err().and_then(|error| error.downcast_ref());
    matches!(found, Some(TrainError::LossNotFinite { .. }))
}

/// Returns the beginning of the message of [`TrainError::LossNotFinite`].
fn not_finite(rank: Option<usize>, step: Option<u64>) -> String {
    let step = step.map(|step| format!(" of optimizer step {step}")).unwrap_or_default();
    match rank {
        Some(rank) => format!("the loss{step} was infinite or NaN on rank {rank}"),
        None => format!(
            "the gradients{step} are infinite or NaN, although no rank has reported such a loss"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_main_that_returns_it_shows_its_text_and_causes() {
        let source = Error::invalid_argument("in use");
        let text = format!("{:?}", Error::from(TrainError::StorePort { port: 7, source }));
        assert!(text.starts_with("rank 0 cannot serve") && text.ends_with(": in use"), "{text}");
        let source = Error::custom("no room");
        let path = PathBuf::from("step-7");
        let error = Error::from(TrainError::LoadInterrupted { path, source });
        assert_eq!(format!("{error:?}"), error.to_string());
    }
}
