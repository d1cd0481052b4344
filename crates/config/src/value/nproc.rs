//! How many ranks a host has.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// Ranks on each host: a number, or what to count on that host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nproc {
    /// That many.
    Count(NonZeroUsize),
    /// One for each GPU; where there is none, one for each core.
    Auto,
    /// One for each GPU.
    Gpu,
    /// One for each core.
    Cpu,
}

impl Nproc {
    /// `count` ranks; `None` for none.
    #[must_use]
    pub fn of(count: usize) -> Option<Self> {
        NonZeroUsize::new(count).map(Self::Count)
    }
}

impl FromStr for Nproc {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "gpu" => Ok(Self::Gpu),
            "cpu" => Ok(Self::Cpu),
            number => number.parse().map(Self::Count).map_err(|_| ()),
        }
    }
}

impl fmt::Display for Nproc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => count.fmt(f),
            Self::Auto => f.write_str("auto"),
            Self::Gpu => f.write_str("gpu"),
            Self::Cpu => f.write_str("cpu"),
        }
    }
}

super::words! {
    Nproc: "a whole number from 1, or auto, gpu or cpu";
}
