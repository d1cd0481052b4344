//! Faults of devices, as drivers report them in the kernel's log.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A device fault that one kernel message reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Driver's name for such reports: `Xid`, `SXid`, `NVRM` or `amdgpu`.
    pub source: &'static str,
    /// The driver's code for the kind of fault. `None` for messages without a code.
    pub code: Option<u32>,
    /// PCI address of the card, without the function. `None` for messages without an address.
    pub pci: Option<String>,
    /// `true` if the device or a link may be broken, rather than the program.
    pub is_serious: bool,
    /// `true` if the fault only follows from another fault, or from the end of the program.
    pub is_consequence: bool,
    /// `true` if the device is unusable until it is reset or the host is restarted.
    pub needs_reset: bool,
    /// Meaning of the fault, in words for the user.
    pub means: String,
    /// Recommended action for the user.
    pub remedy: String,
}

impl Fault {
    /// Returns `true` if the fault belongs to the device with this PCI address.
    #[must_use]
    pub fn is_of(&self, address: &str) -> bool {
        let rest = self.pci.as_deref().and_then(|card| address.strip_prefix(card));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

/// A device fault that affects a job, as the launcher reports it.
///
/// Described in `docs/events.md` as an object in `device_faults`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceFault {
    /// Name of the host.
    pub host: String,
    /// PCI address of the device or of its card. Empty for messages without an address.
    pub device: String,
    /// Rank of the job that uses the device. `None` if no rank does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Driver's name for the fault, such as `Xid 79`.
    pub fault: String,
    /// Number of kernel messages that reported this fault.
    pub count: usize,
    /// `true` if the fault was reported before the attempt began and the device is unusable until it is reset.
    pub is_earlier: bool,
    /// Meaning of the fault, in words for the user.
    pub means: String,
    /// Recommended action for the user.
    pub remedy: String,
    /// Kernel message of the first report.
    pub message: String,
}

impl DeviceFault {
    /// Returns the fault with every text passed through `shown`, which escapes texts from another host before display.
    #[must_use]
    pub fn with_texts(self, shown: impl Fn(&str) -> String) -> Self {
        Self {
            host: shown(&self.host),
            device: shown(&self.device),
            fault: shown(&self.fault),
            means: shown(&self.means),
            remedy: shown(&self.remedy),
            message: shown(&self.message),
            ..self
        }
    }
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, device, rank, fault, count, is_earlier, means, remedy, .. } = self;
        f.write_str(fault)?;
        if *count > 1 {
            write!(f, " ({count} times)")?;
        }
        if device.is_empty() {
            f.write_str(" on a GPU")?;
        } else {
            write!(f, " at PCI {device}")?;
        }
        if let Some(rank) = rank {
            write!(f, ", the GPU of rank {rank}")?;
        }
        if !host.is_empty() {
            write!(f, " on {host}")?;
        }
        if *is_earlier {
            f.write_str(" (before this attempt)")?;
        }
        write!(f, ": {means}; {remedy}")
    }
}
