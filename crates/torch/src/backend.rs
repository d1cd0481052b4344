//! Backends that move data between ranks.

use std::ffi::OsStr;

use cxx::UniquePtr;
use tch::Device;

use crate::bridge::ffi;
use crate::store::{Store, milliseconds};

/// The library that performs collectives and messages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Gloo, for CPU tensors, over TCP. If all ranks of a group are on one host, all-reduces, reduce-scatters and
    /// all-gathers use shared memory; `BRIGADE_SHARED_MEMORY=0` makes them use TCP, too. Tensors on GPUs are copied to
    /// the host and back, which is slow, but ranks may share a GPU, which NCCL does not support.
    Gloo(GlooDevice),
    /// NCCL for CUDA tensors, with Gloo beside it for CPU tensors, objects and barriers. Needs the feature `cuda` and a
    /// GPU for each rank. Waiting for an operation on CUDA tensors does not block the host but the current stream; with
    /// [`crate::ProcessGroup::within`] it blocks the host, at most until the limit.
    ///
    /// A hang ends at the group's time limit: c10d's watchdog aborts the communicator, and the next operation is an
    /// error of [`Fault::Timeout`](crate::Fault::Timeout). The environment variable `TORCH_NCCL_ASYNC_ERROR_HANDLING`
    /// with the value 0 or 3 changes that; 1, which launchers set, counts as unset.
    Nccl,
    /// TorchTPU's process group for tensors on TPUs, with Gloo beside it for CPU tensors, objects and barriers
    /// (experimental, tried with one rank only). The chips of the ranks exchange data themselves, so all ranks must be
    /// on one slice, one on each chip, as `brigade launch` starts them on a host whose chips are all used. It has no
    /// time limit and no operation `reduce`, and subgroups of fewer ranks use Gloo. Needs the feature `tpu`.
    ///
    /// An `Accelerator` with this backend prepares TorchTPU for it. Another program calls [`crate::join_tpu_slice`]
    /// before it loads TorchTPU.
    Tpu,
    /// A simulated backend: every operation completes at once, as if all ranks had sent the same data as this one. It
    /// counts the messages that a rank would send ([`crate::ProcessGroup::traffic`]).
    Fake,
}

/// Network interface or address on which Gloo listens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum GlooDevice {
    /// Interfaces listed in `GLOO_SOCKET_IFNAME` (comma-separated), else the address that this host's name resolves to,
    /// else the loopback.
    #[default]
    Default,
    /// Network interfaces, one or more, such as `eth0`.
    Interfaces(Vec<String>),
    /// Host name or address of this host, such as `127.0.0.1`.
    Address(String),
}

/// Parameters of one rank of a group for the C++ side.
pub(crate) struct RankInfo<'a> {
    /// Store with the ranks' addresses for Gloo.
    pub(crate) store: &'a Store,
    /// The same for the backend of devices.
    pub(crate) device_store: &'a Store,
    /// Network interface or address of Gloo beside another backend.
    pub(crate) gloo: &'a GlooDevice,
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
        let RankInfo { store, device_store, gloo, rank, size, name, timeout, share_memory } =
            *rank_info;
        let options = |device: &'_ GlooDevice| {
            let (address, interfaces) = match device {
                GlooDevice::Default => (String::new(), interfaces_from_env()),
                GlooDevice::Interfaces(names) => (String::new(), names.clone()),
                GlooDevice::Address(address) => (address.clone(), Vec::new()),
            };
            let share_memory = share_memory
                && allows_sharing(std::env::var_os("BRIGADE_SHARED_MEMORY").as_deref());
            let timeout_ms = milliseconds(timeout);
            ffi::GlooOptions { name, address, interfaces, share_memory, timeout_ms }
        };
        match self {
            Self::Gloo(device) => ffi::gloo_group(store.raw(), rank, size, &options(device)),
            Self::Nccl => {
                ffi::nccl_group(device_store.raw(), store.raw(), rank, size, &options(gloo))
            }
            #[cfg(feature = "tpu")]
            Self::Tpu => {
                ffi::tpu_group(device_store.raw(), store.raw(), rank, size, &options(gloo))
            }
            #[cfg(not(feature = "tpu"))]
            Self::Tpu => unreachable!("refused before: this program has no TPU"),
            Self::Fake => ffi::fake_group(store.raw(), rank, size, name),
        }
    }

    /// Returns `true` if Gloo moves the tensors of a device.
    pub(crate) fn is_gloo(&self, device: Device) -> bool {
        match self {
            Self::Gloo(_) => true,
            Self::Nccl | Self::Tpu => device == Device::Cpu,
            Self::Fake => false,
        }
    }

    /// Returns `true` if the backend computes means of a device's tensors itself.
    pub(crate) fn has_mean(&self, device: Device) -> bool {
        !self.is_gloo(device) && *self != Self::Tpu
    }
}

/// Reads PyTorch's variable for the choice of interfaces without a change to the program.
fn interfaces_from_env() -> Vec<String> {
    std::env::var("GLOO_SOCKET_IFNAME")
        .map(|names| names.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect())
        .unwrap_or_default()
}

/// Returns `false` if the value of the variable disables shared memory. The variable needs no change to the program.
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
