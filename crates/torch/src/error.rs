//! The error that all crates on libtorch share.

mod torch_error;

use std::error::Error as StdError;
use std::fmt;

use tch::TchError;

pub(crate) use torch_error::Thrown;
pub use torch_error::{CollectiveError, Fault, TorchError, is_out_of_memory_message};

/// The result of a fallible function of layers, datasets, optimizers, metrics and training loops.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of models, data, optimizers, metrics, training loops and collectives, so that `?` converts each of them in
/// one program.
///
/// [`kind`](Self::kind) shows how a program can react. The detail is an enum of the crate in which it happened, such as
/// [`TorchError`], or a custom error of the program; [`downcast_ref`](Self::downcast_ref) returns it. `Display` and
/// `source` are those of the detail. `Debug` is the text with its causes instead of the fields, because a program whose
/// `main` returns the error prints it.
///
/// ```
/// use brigade_torch::{Error, ErrorKind, Result};
/// use tch::{Kind, Tensor};
///
/// fn rows(values: &[f32], width: i64) -> Result<Tensor> {
///     if width < 1 {
///         return Err(Error::invalid_argument(format!("a width of {width}: expected at least 1")));
///     }
///     Ok(Tensor::from_slice(values).f_view([-1, width])?)
/// }
///
/// assert_eq!(rows(&[1.0; 6], 3)?.size(), [2, 3]);
/// assert_eq!(rows(&[1.0; 6], 0).unwrap_err().kind(), ErrorKind::InvalidArgument);
/// match rows(&[1.0; 6], 4) {
///     Err(error) if error.kind() == ErrorKind::Tensor => println!("skipped: {error}"),
///     other => panic!("{other:?}"),
/// }
/// # Ok::<_, Error>(())
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    detail: Box<dyn StdError + Send + Sync>,
}

/// The kind of an [`Error`], by which a program can decide how to react.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A call was made that its documentation excludes. Change the program.
    InvalidArgument,
    /// An operation on tensors failed in libtorch, such as for shapes that do not match. A program may leave out the
    /// batch.
    Tensor,
    /// Memory of the host or of a device ran out. A program may try a smaller batch.
    OutOfMemory,
    /// A rank, the store or the network failed, see [`Error::fault`]. The ranks start again from a checkpoint.
    Communication,
    /// The ranks disagree: they have different models, data or calls. Compare the ranks' inputs.
    RanksDiffer,
    /// The launcher's environment variables are missing or contradict each other. Start the job in another way.
    Environment,
    /// A model could not be built or changed, or its forward failed. Change the model's code or its input.
    Model,
    /// A sample or a batch could not be made. A dataset may return another sample instead.
    Data,
    /// A file could not be read, written or fetched. A program may try again, or use another place.
    Io,
    /// Weights or a checkpoint are damaged, or belong to another model or version. A program may load an earlier
    /// checkpoint.
    Checkpoint,
    /// A loss or a gradient is infinite or NaN. A program may return to a checkpoint and lower the learning rate.
    NotFinite,
    /// A metric could not be computed. A program may continue without it.
    Metric,
    /// A tracker could not write. A program may continue without it.
    Tracker,
    /// A custom error of the program. [`Error::downcast_ref`] returns it.
    Custom,
    /// An invariant of Brigade does not hold: a bug of the library, not of the program.
    Internal,
}

impl Error {
    /// Creates an error of a kind from its detail.
    pub fn new(kind: ErrorKind, detail: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self(Box::new(Inner { kind, detail: detail.into() }))
    }

    /// Wraps a custom error of the program, or a plain message.
    ///
    /// Its kind is [`ErrorKind::Custom`], or [`ErrorKind::OutOfMemory`] if it or a cause is that memory ran out. An
    /// [`Error`] is returned unchanged.
    ///
    /// ```
    /// use std::num::ParseIntError;
    ///
    /// use brigade_torch::{Error, ErrorKind, Result};
    ///
    /// fn label(text: &str) -> Result<i64> {
    ///     text.parse().map_err(Error::custom)
    /// }
    ///
    /// let error = label("cat").unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Custom);
    /// assert!(error.downcast_ref::<ParseIntError>().is_some());
    /// assert_eq!(Error::custom("the tape is torn").to_string(), "the tape is torn");
    /// ```
    pub fn custom(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        match error.into().downcast::<Self>() {
            Ok(error) => *error,
            Err(detail) => {
                let memory =
                    chain(detail.as_ref()).any(|link| is_out_of_memory_message(&link.to_string()));
                Self::new(if memory { ErrorKind::OutOfMemory } else { ErrorKind::Custom }, detail)
            }
        }
    }

    /// Creates an error of the kind [`ErrorKind::InvalidArgument`] from its message.
    pub fn invalid_argument(message: impl Into<String>) -> Self {
        TorchError::InvalidArgument(message.into()).into()
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the kind of failure of libtorch or a collective. `None` for other errors.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.downcast_ref::<TorchError>().and_then(TorchError::fault)
    }

    /// Returns `true` if memory ran out, on the host or on a device.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.kind() == ErrorKind::OutOfMemory
    }

    /// Returns the detail of the error if it has this type, else the first of its causes that has it. `None` if there
    /// is none.
    ///
    /// ```
    /// use brigade_torch::{Error, Fault, Store, TorchError};
    /// use std::time::Duration;
    ///
    /// let error = Store::hash()?.wait(&["no such key"], Duration::from_millis(1)).unwrap_err();
    /// let Some(TorchError::Store { operation, .. }) = error.downcast_ref() else { panic!("{error}") };
    /// assert_eq!((*operation, error.fault()), ("wait", Some(Fault::Timeout)));
    /// # Ok::<_, Error>(())
    /// ```
    #[must_use]
    pub fn downcast_ref<T: StdError + 'static>(&self) -> Option<&T> {
        chain(self.0.detail.as_ref()).find_map(|link| link.downcast_ref())
    }

    /// Converts the error into its detail of this type.
    ///
    /// # Errors
    /// Returns the error itself if its detail is of another type.
    pub fn downcast<T: StdError + 'static>(self) -> Result<T> {
        let Inner { kind, detail } = *self.0;
        match detail.downcast() {
            Ok(detail) => Ok(*detail),
            Err(detail) => Err(Self::new(kind, detail)),
        }
    }

    pub(crate) fn libtorch(operation: &'static str, error: &cxx::Exception) -> Self {
        let thrown = Thrown::read(error);
        let fault = thrown.fault();
        TorchError::Libtorch { operation, fault, detail: thrown.detail }.into()
    }
}

/// Formats an error and its causes. An [`Error`] is replaced by its detail.
fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    let mut next = Some(error);
    std::iter::from_fn(move || {
        let link = next?;
        next = link.source();
        Some(link)
    })
    .map(|link| {
        link.downcast_ref::<Error>()
            .map_or(link, |error| -> &(dyn StdError + 'static) { error.0.detail.as_ref() })
    })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.detail.fmt(f)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&brigade_rank_env::with_causes(self))
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.detail.source()
    }
}

impl From<TorchError> for Error {
    fn from(error: TorchError) -> Self {
        Self::new(error.kind(), error)
    }
}

impl From<CollectiveError> for Error {
    fn from(error: CollectiveError) -> Self {
        TorchError::Collective(Box::new(error)).into()
    }
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        TorchError::Tensor(error).into()
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::new(ErrorKind::Io, error)
    }
}

impl From<brigade_checkpoint::QuantizeError> for Error {
    fn from(error: brigade_checkpoint::QuantizeError) -> Self {
        Self::new(ErrorKind::InvalidArgument, error)
    }
}

impl From<brigade_checkpoint::Error> for Error {
    fn from(error: brigade_checkpoint::Error) -> Self {
        let kind = match error {
            brigade_checkpoint::Error::Io { .. } => ErrorKind::Io,
            _ => ErrorKind::Checkpoint,
        };
        Self::new(kind, error)
    }
}

impl From<brigade_rank_env::WorldError> for Error {
    fn from(error: brigade_rank_env::WorldError) -> Self {
        Self::new(ErrorKind::Environment, error)
    }
}

impl From<brigade_sampling::PlanError> for Error {
    fn from(error: brigade_sampling::PlanError) -> Self {
        Self::new(ErrorKind::InvalidArgument, error)
    }
}

/// A wrong variable is an error of the environment, any other an error of an argument.
impl From<brigade_sharding::ShardingError> for Error {
    fn from(error: brigade_sharding::ShardingError) -> Self {
        let kind = match error {
            brigade_sharding::ShardingError::Variable { .. } => ErrorKind::Environment,
            _ => ErrorKind::InvalidArgument,
        };
        Self::new(kind, error)
    }
}

impl From<brigade_schedule::ScheduleError> for Error {
    fn from(error: brigade_schedule::ScheduleError) -> Self {
        Self::new(ErrorKind::InvalidArgument, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("batch {batch}: {source}")]
    struct AtBatch {
        batch: usize,
        source: Error,
    }

    #[test]
    fn an_error_is_one_pointer_wide() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn details_are_found_behind_other_errors() {
        let fault = Fault::PeerLost;
        let lost = TorchError::Libtorch { operation: "wait", fault, detail: "gone".into() };
        let source = Error::from(lost);
        assert_eq!(source.kind(), ErrorKind::Communication);
        let error = Error::new(source.kind(), AtBatch { batch: 3, source });
        assert_eq!(error.fault(), Some(Fault::PeerLost));
        assert_eq!(error.downcast_ref::<AtBatch>().map(|detail| detail.batch), Some(3));
        assert!(error.downcast_ref::<TchError>().is_none());
        // A message that contains the message of its cause is printed without the latter.
        assert_eq!(format!("{error:?}"), "batch 3: wait failed (a peer is gone): gone");
        let error = error.downcast::<TorchError>().unwrap_err();
        assert_eq!(error.downcast::<AtBatch>().unwrap().batch, 3);
    }

    #[test]
    fn what_is_an_error_already_is_not_wrapped_as_custom() {
        let boxed: Box<dyn StdError + Send + Sync> = Error::invalid_argument("a width of 0").into();
        assert_eq!(Error::custom(boxed).kind(), ErrorKind::InvalidArgument);
        assert!(Error::custom("CUDA out of memory").is_out_of_memory());
    }
}
