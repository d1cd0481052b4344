//! Why the text of an option's value is not one.

/// The value of an option cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// Something else was expected.
    #[error("expected {expected}, found {found:?}")]
    Expected {
        /// What can stand there.
        expected: &'static str,
        /// The part that is wrong.
        found: String,
    },
    /// A list names something twice.
    #[error("{what} {value} is given twice")]
    Twice {
        /// What kind of thing.
        what: &'static str,
        /// Which one.
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
