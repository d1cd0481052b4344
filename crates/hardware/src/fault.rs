//! Faults of devices, as drivers report them in the kernel's log.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A device fault that one kernel message reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Driver's name for such reports: `Xid`, `SXid`, or the name of the driver.
    pub source: &'static str,
    /// The driver's number for the kind of fault, where it has one.
    pub code: Option<u32>,
    /// The card's PCI address without function, where the message has one.
    pub pci: Option<String>,
    /// The device or a link may be broken: it is not the program's own fault.
    pub is_serious: bool,
    /// `true` if the fault only follows from another fault, or from the end of the program.
    pub is_consequence: bool,
    /// The device stays useless until it is reset, or the host restarted.
    pub needs_reset: bool,
    /// Meaning of the fault.
    pub means: String,
    /// Remedy for the fault.
    pub remedy: String,
}

impl Fault {
    /// Returns `true` if the fault is of the device with this PCI address.
    #[must_use]
    pub fn is_of(&self, address: &str) -> bool {
        let rest = self.pci.as_deref().and_then(|card| address.strip_prefix(card));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

/// A fault of a device of a job, as its launcher reports it.
///
/// `docs/events.md` has it as an object in `device_faults`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceFault {
    /// Name of the host.
    pub host: String,
    /// PCI address of the device, or of its card; empty where the message has none.
    pub device: String,
    /// The rank in the job whose device it is, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Driver's name for the fault, such as `Xid 79`.
    pub fault: String,
    /// Number of reports.
    pub count: usize,
    /// `true` if the fault was reported before the attempt began and the device is unusable until it is reset.
    pub is_earlier: bool,
    /// Meaning of the fault.
    pub means: String,
    /// Remedy for the fault.
    pub remedy: String,
    /// The driver's own words, of the first report.
    pub message: String,
}

impl DeviceFault {
    /// Returns the same with every text passed through `shown`: of another host, before it is shown.
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
