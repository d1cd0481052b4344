//! Errors of datasets of images.

use brigade_images::ImageError;
use brigade_torch::{Error, ErrorKind};

/// Reason why a batch of images could not be made: the detail of an [`Error`].
///
/// ```
/// use brigade_torch::{Error, ErrorKind};
/// use brigade_vision::{ImageError, VisionError};
///
/// let error = ImageError::InvalidArgument("no size".into());
/// let error = Error::from(VisionError::from(error));
/// assert_eq!((error.kind(), error.to_string()), (ErrorKind::InvalidArgument, "no size".into()));
/// assert!(error.downcast_ref::<ImageError>().is_some());
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// Images could not be found, read or transformed.
    #[error("{0}")]
    Image(#[from] ImageError),
    /// The ranks of a job do not have the same images.
    #[error(
        "{} other images than rank 0, by name, order or size; give every host the same files",
        ranks_see(ranks)
    )]
    RanksDiffer {
        /// Ranks that differ from rank 0.
        ranks: Vec<usize>,
    },
}

impl From<VisionError> for Error {
    fn from(error: VisionError) -> Self {
        let kind = match &error {
            VisionError::Image(ImageError::Read { .. }) => ErrorKind::Io,
            VisionError::Image(ImageError::InvalidArgument(_)) => ErrorKind::InvalidArgument,
            VisionError::Image(_) => ErrorKind::Data,
            VisionError::RanksDiffer { .. } => ErrorKind::RanksDiffer,
        };
        Self::new(kind, error)
    }
}

/// Formats the ranks of the message: "rank 1 sees", or "ranks 1, 2 and 3 see".
fn ranks_see(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match list.as_slice() {
        [one] => format!("rank {one} sees"),
        [first @ .., last] => format!("ranks {} and {last} see", first.join(", ")),
        [] => "ranks see".to_owned(),
    }
}
