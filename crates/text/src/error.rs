//! What can go wrong with texts as batches and with text Learners.

use brigade_data::DataError;

/// What fallible functions of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Texts could not be read or split into tokens.
    #[error(transparent)]
    Tokens(#[from] brigade_tokens::Error),
    /// A data set or a loader failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The Learner or its loaders failed.
    #[error(transparent)]
    Learn(#[from] brigade_learn::Error),
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] tch::TchError),
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    InvalidArgument(String),
}

macro_rules! through_learn {
    ($($error:ty),+) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::Learn(error.into())
            }
        })+
    };
}

through_learn!(brigade_torch::Error, brigade_train::Error, brigade_nn::Error);

impl From<Error> for brigade_learn::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Learn(error) => error,
            Error::Data(error) => error.into(),
            Error::Tensor(error) => error.into(),
            Error::InvalidArgument(message) => Self::InvalidArgument(message),
            error => Self::user(error),
        }
    }
}

impl From<Error> for DataError {
    fn from(error: Error) -> Self {
        match error {
            Error::Data(error) => error,
            error => Self::other(error),
        }
    }
}
