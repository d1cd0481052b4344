//! Places of weights.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::DeviceMapError;

/// Place of weights: a GPU, the host's memory or the disk. Written as `cuda:0`, `cpu` and `disk`. `cuda`, `gpu:0` and
/// `0` are also accepted.
///
/// ```
/// use brigade_sharding::device_map::Place;
///
/// assert_eq!("gpu:1".parse(), Ok(Place::Cuda(1)));
/// assert_eq!(Place::Cuda(1).to_string(), "cuda:1");
/// assert!("gpu:first".parse::<Place>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The memory of a GPU, by its number.
    Cuda(usize),
    /// The memory of the host.
    Cpu,
    /// The files of the weights, which are read when the weights are needed.
    Disk,
}

impl Place {
    /// Returns `true` if the place is the memory of a GPU.
    #[must_use]
    pub fn is_gpu(self) -> bool {
        matches!(self, Self::Cuda(_))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(index) => f.pad(&format!("cuda:{index}")),
            Self::Cpu => f.pad("cpu"),
            Self::Disk => f.pad("disk"),
        }
    }
}

impl FromStr for Place {
    type Err = DeviceMapError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || DeviceMapError::UnknownPlace { text: text.to_owned() };
        let index = match text {
            "cpu" => return Ok(Self::Cpu),
            "disk" => return Ok(Self::Disk),
            "cuda" | "gpu" => "0",
            _ => text.strip_prefix("cuda:").or_else(|| text.strip_prefix("gpu:")).unwrap_or(text),
        };
        // `parse` would also accept a sign.
        let is_number = index.bytes().all(|byte| byte.is_ascii_digit());
        index.parse().ok().filter(|_| is_number).map(Self::Cuda).ok_or_else(unknown)
    }
}

/// Serializes a place as in Accelerate's maps: a GPU is a number.
impl Serialize for Place {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Cuda(index) => serializer.serialize_u64(*index as u64),
            Self::Cpu | Self::Disk => serializer.collect_str(self),
        }
    }
}
