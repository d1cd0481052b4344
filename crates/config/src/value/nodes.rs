//! How many hosts a job has.

use std::fmt;
use std::str::FromStr;

use super::positive;

/// Hosts of a job: as many as there must be, and as many as there may be.
///
/// ```
/// use brigade_config::Nodes;
///
/// let nodes: Nodes = "1:4".parse().unwrap();
/// assert_eq!((nodes.min, nodes.max), (1, 4));
/// assert_eq!("2".parse(), Ok(Nodes { min: 2, max: 2 }));
/// assert!("4:1".parse::<Nodes>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// Without so many the job does not run.
    pub min: usize,
    /// More do not take part.
    pub max: usize,
}

impl Nodes {
    /// One host: nobody to meet.
    pub const ONE: Self = Self { min: 1, max: 1 };

    /// Hosts may join and leave.
    #[must_use]
    pub fn is_elastic(self) -> bool {
        self.min != self.max
    }
}

impl FromStr for Nodes {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        match (positive(min), positive(max)) {
            (Some(min), Some(max)) if min <= max => Ok(Self { min, max }),
            _ => Err(()),
        }
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_elastic() { write!(f, "{}:{}", self.min, self.max) } else { self.min.fmt(f) }
    }
}

super::words! {
    Nodes: "a number of hosts from 1, or MIN:MAX";
}
