//! Notes on a sharding plan, for the user.

use std::fmt;

use brigade_rank_env::text::escaped;

/// Note on a sharding plan, for the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// Two units were merged because they share a tied parameter.
    MergedByTie {
        /// Name of the unit that was merged into the other one.
        unit: String,
        /// Name of the unit that has its parameters now. Empty for the root.
        into: String,
        /// Names of the tied parameter.
        names: Vec<String>,
    },
    /// All parameters are in one unit, so that each rank gathers all of them at once.
    OneUnit {
        /// Bytes of all whole parameters.
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
