//! What a user should know of a plan.

use std::fmt;

use brigade_rank_env::text::escaped;

/// What a user should know of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// A tied parameter is in two units, which became one.
    MergedByTie {
        /// The unit that is no longer one by itself.
        unit: String,
        /// The unit that has its parameters now; empty for the root.
        into: String,
        /// Names of the parameter.
        names: Vec<String>,
    },
    /// All parameters are one unit, so that all of them are whole at a time.
    OneUnit {
        /// Bytes of the whole parameters.
        bytes: u64,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MergedByTie { unit, into, names } => {
                let into = if into.is_empty() { "the root" } else { into };
                let names = names.join(" = ");
                let (unit, into, names) = (escaped(unit), escaped(into), escaped(names));
                write!(f, "units {into} and {unit} are one: they share {names}")
            }
            Self::OneUnit { bytes } => write!(
                f,
                "the model is one unit: each rank has all of its {bytes} bytes of parameters at a time; name units \
                 with `path.unit()` or a pattern"
            ),
        }
    }
}
