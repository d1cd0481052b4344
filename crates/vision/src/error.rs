//! What can go wrong with batches of images.

use brigade_data::DataError;
use brigade_images::ImageError;

/// The result of a function of this crate.
pub type Result<T, E = VisionError> = std::result::Result<T, E>;

/// Why batches of images could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// Images could not be found, read or transformed.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The ranks of a job do not see the same images.
    #[error(
        "{} other images than rank 0, by name, order or size; give every host the same files",
        ranks_see(ranks)
    )]
    RanksDiffer {
        /// The ranks that differ from rank 0.
        ranks: Vec<usize>,
    },
    /// A value that was given cannot be used.
    #[error("{0}")]
    InvalidArgument(String),
    /// A tensor operation failed.
    #[error(transparent)]
    Torch(#[from] brigade_torch::Error),
}

impl From<VisionError> for DataError {
    fn from(error: VisionError) -> Self {
        match error {
            VisionError::Torch(error) => Self::Torch(error),
            error => Self::other(error),
        }
    }
}

/// "rank 1 sees", or "ranks 1, 2 and 3 see".
fn ranks_see(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match list.as_slice() {
        [one] => format!("rank {one} sees"),
        [first @ .., last] => format!("ranks {} and {last} see", first.join(", ")),
        [] => "ranks see".to_owned(),
    }
}
