//! Errors of option values that cannot be parsed.

/// Error for the value of an option that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The value has a part that is not valid.
    #[error("expected {expected}, found {found:?}")]
    Expected {
        /// Description of the valid values.
        expected: &'static str,
        /// Part of the value that is not valid.
        found: String,
    },
    /// A list contains something twice.
    #[error("{what} {value} is given twice")]
    Twice {
        /// Kind of the repeated item.
        what: &'static str,
        /// Name of the repeated item.
        value: String,
    },
}

impl ValueError {
    pub(crate) fn expected(expected: &'static str, found: &str) -> Self {
        Self::Expected { expected, found: found.to_owned() }
    }

    pub(crate) fn twice(what: &'static str, value: String) -> Self {
        Self::Twice { what, value }
    }
}
