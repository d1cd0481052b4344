//! Errors of datasets of texts and of text Learners.

use brigade_tokens::Error as TokenError;
use brigade_torch::{Error, ErrorKind};

/// Reason why a batch of texts could not be made: the detail of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// Texts could not be read or tokenized.
    #[error("{0}")]
    Tokens(#[from] TokenError),
}

impl From<TextError> for Error {
    fn from(error: TextError) -> Self {
        let TextError::Tokens(found) = &error;
        let kind = match found {
            TokenError::InvalidArgument(_) => ErrorKind::InvalidArgument,
            _ => ErrorKind::Data,
        };
        Self::new(kind, error)
    }
}
