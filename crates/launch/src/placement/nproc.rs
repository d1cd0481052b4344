//! Number of ranks on a host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ValueError;

/// Number of ranks on a host, or what to derive it from.
///
/// ```
/// use brigade_launch::NprocSpec;
/// assert_eq!("auto".parse(), Ok(NprocSpec::Auto));
/// assert_eq!("4".parse(), Ok(NprocSpec::from(4)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NprocSpec {
    /// A fixed number of ranks.
    Count(usize),
    /// A rank for each GPU if the host has any, else one for each core.
    Auto,
    /// A rank for each GPU.
    Gpu,
    /// A rank for each core that this process may use.
    Cpu,
}

impl From<usize> for NprocSpec {
    fn from(count: usize) -> Self {
        Self::Count(count)
    }
}

impl FromStr for NprocSpec {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "auto" => Ok(Self::Auto),
            "gpu" => Ok(Self::Gpu),
            "cpu" => Ok(Self::Cpu),
            _ => match text.parse() {
                Ok(count) => Ok(Self::Count(count)),
                Err(_) => Err(ValueError::expected("a number, auto, gpu or cpu", text)),
            },
        }
    }
}

impl fmt::Display for NprocSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => count.fmt(f),
            Self::Auto => f.write_str("auto"),
            Self::Gpu => f.write_str("gpu"),
            Self::Cpu => f.write_str("cpu"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        for text in ["0", "1", "128", "auto", "gpu", "cpu"] {
            assert_eq!(text.parse::<NprocSpec>().unwrap().to_string(), text);
        }
        for wrong in ["", "two", "-1", "1.5", "xpu", "GPU"] {
            let error = wrong.parse::<NprocSpec>().unwrap_err().to_string();
            assert_eq!(error, format!("expected a number, auto, gpu or cpu, found {wrong:?}"));
        }
    }
}
