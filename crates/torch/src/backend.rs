//! What moves the data between ranks.

use std::ffi::OsStr;

use cxx::UniquePtr;
use tch::Device;

use crate::bridge::ffi;
use crate::cuda::cuda_devices;
use crate::error::{Error, Fault};
use crate::store::{Store, milliseconds};

/// The library that moves the data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Gloo, for CPU tensors, over TCP. Where all ranks of a group are on one host, all-reduces go
    /// through memory that they share; `BRIGADE_SHARED_MEMORY=0` has them go over TCP, too.
    Gloo(GlooDevice),
    /// NCCL, for CUDA tensors. Needs the feature `cuda`.
    Nccl,
    /// Answers at once as if all ranks sent what this one sends; for simulation.
    Fake,
}

/// Where Gloo listens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum GlooDevice {
    /// The interfaces in `GLOO_SOCKET_IFNAME` (a comma-separated list), else the address that this
    /// host's name resolves to, else the loopback.
    #[default]
    Default,
    /// One or more network interfaces, such as `eth0`.
    Interfaces(Vec<String>),
    /// A host name or an address of this host, such as `127.0.0.1`.
    Address(String),
}

/// The numbers of one rank of one group, as the C++ side wants them.
pub(crate) struct RankInfo<'a> {
    pub(crate) store: &'a Store,
    pub(crate) rank: i32,
    pub(crate) size: i32,
    pub(crate) name: &'a str,
    pub(crate) timeout: std::time::Duration,
    pub(crate) share_memory: bool,
}

impl Backend {
    pub(crate) fn connect(
        &self,
        rank_info: &RankInfo<'_>,
    ) -> Result<UniquePtr<ffi::Group>, cxx::Exception> {
        let RankInfo { store, rank, size, name, timeout, share_memory } = *rank_info;
        let timeout_ms = milliseconds(timeout);
        match self {
            Self::Gloo(device) => {
                let (address, interfaces) = match device {
                    GlooDevice::Default => ("", interfaces_from_env()),
                    GlooDevice::Interfaces(names) => ("", names.clone()),
                    GlooDevice::Address(address) => (address.as_str(), Vec::new()),
                };
                let share_memory = share_memory
                    && allows_sharing(std::env::var_os("BRIGADE_SHARED_MEMORY").as_deref());
                let options =
                    ffi::GlooOptions { name, address, interfaces, share_memory, timeout_ms };
                ffi::gloo_group(store.raw(), rank, size, &options)
            }
            Self::Nccl => ffi::nccl_group(store.raw(), rank, size, name, timeout_ms),
            Self::Fake => ffi::fake_group(store.raw(), rank, size, name),
        }
    }

    /// Checks what was asked for, before the network is touched.
    pub(crate) fn check(&self, name: &str) -> Result<(), Error> {
        match self {
            Self::Gloo(GlooDevice::Interfaces(names)) if names.is_empty() => {
                Err(Error::InvalidArgument(format!(
                    "group {name:?}: no network interface given; use GlooDevice::Default"
                )))
            }
            Self::Nccl => cuda_devices().map(drop).map_err(|reason| Error::Libtorch {
                operation: "new_group",
                fault: Fault::Unsupported,
                detail: format!("group {name:?}: NCCL needs a GPU, and {reason}"),
            }),
            _ => Ok(()),
        }
    }

    /// The device for a rank's own messages: with NCCL a GPU, one after the other among the ranks.
    pub(crate) fn device(&self, rank: usize) -> Device {
        match self {
            Self::Nccl => Device::Cuda(rank % cuda_devices().unwrap_or(1)),
            Self::Gloo(_) | Self::Fake => Device::Cpu,
        }
    }
}

/// PyTorch's variable for choosing interfaces without a change to the program.
fn interfaces_from_env() -> Vec<String> {
    std::env::var("GLOO_SOCKET_IFNAME")
        .map(|names| names.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect())
        .unwrap_or_default()
}

/// The variable by which a user turns shared memory off without a change to the program.
fn allows_sharing(variable: Option<&OsStr>) -> bool {
    variable.is_none_or(|value| value != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_turns_shared_memory_off() {
        assert!(allows_sharing(None) && allows_sharing(Some("1".as_ref())));
        assert!(!allows_sharing(Some("0".as_ref())));
    }
}
