//! The hardware of a host, read from the kernel's files: accelerators, the network cards near them, memory with the
//! limits of control groups, and the kernel's log.
//!
//! No driver library is loaded: loading CUDA or NVML takes longer than the rest of a launch, and a process that has
//! opened a device holds memory on it. A [`Vendor`] finds its devices, names the variable that makes a part of them
//! visible, and reads the faults that its driver reports; [`VENDORS`] lists them.
//!
//! ```
//! // Where the file system begins; a test gives a folder of its own.
//! let (vendor, gpus) = brigade_hardware::find(std::path::Path::new("/"));
//! assert_eq!(vendor.default_backend(), "nccl");
//! assert!(gpus.iter().all(|gpu| !gpu.is_usable || !gpu.id.is_empty()));
//! ```

mod amd;
pub mod cgroup;
mod fault;
mod google;
mod kernel_log;
mod memory;
pub mod mounts;
mod nics;
mod nvidia;
pub mod pci;
mod sources;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use fault::{DeviceFault, Fault};
pub use kernel_log::{KMSG, KernelLog, KernelMessage};
pub use memory::Memory;
pub use nics::{NearNic, Nic, nearest, nics, of_device};
pub use pci::Distance;
pub use sources::{Sources, within};

/// A vendor of accelerators. A new one takes one file that implements this trait, and a line in [`VENDORS`].
pub trait Vendor: fmt::Debug + Sync {
    /// Returns the vendor's name, as used in messages.
    fn name(&self) -> &'static str;

    /// Returns the word for one device in messages: `GPU` or `TPU`.
    fn device_word(&self) -> &'static str {
        "GPU"
    }

    /// Returns `true` if only one process can use a device, so that a launcher gives each rank one of its own.
    fn is_for_one_process(&self) -> bool {
        false
    }

    /// Returns the devices that the kernel lists under `root`, where the file system begins, in the order in which
    /// programs number them. Devices that programs cannot open are included and marked.
    fn discover(&self, root: &Path) -> Vec<Device>;

    /// Returns the environment variables that restrict a program to some of the devices, in layers. Each layer numbers
    /// the devices that the layer before has left; within a layer the first variable that is set counts. A launcher
    /// sets the first variable of the last layer.
    fn visibility(&self) -> &'static [&'static [&'static str]];

    /// Returns the prefixes of device names other than numbers, such as `GPU-`.
    fn id_prefixes(&self) -> &'static [&'static str];

    /// Returns `true` if a name denotes a part of a device (MIG), which the kernel's files do not list.
    fn is_part(&self, id: &str) -> bool;

    /// Returns the default backend for collectives between these devices.
    fn default_backend(&self) -> &'static str;

    /// Returns the Kubernetes resource name of one device, as used in the limits of a container.
    fn kubernetes_resource(&self) -> &'static str;

    /// Returns the state of the driver under `root`, given the devices found under the same root.
    fn driver(&self, root: &Path, devices: &[Device]) -> Driver;

    /// Returns names and commands for messages about a missing or incomplete driver.
    fn driver_words(&self) -> &'static DriverWords;

    /// Returns the oldest driver version that supports a version of the vendor's toolkit. `None` if unknown.
    fn oldest_driver(&self, _toolkit: &str) -> Option<&'static str> {
        None
    }

    /// Returns the program that prints the memory sizes of devices. `None` where the kernel's files have them.
    fn memory_query(&self) -> Option<&'static MemoryQuery> {
        None
    }

    /// Returns the fault that a message of the kernel log reports. `None` if it does not report a fault of this
    /// vendor's devices.
    fn fault(&self, message: &str) -> Option<Fault>;

    /// Returns the environment variable that a launcher sets to choose devices.
    fn visibility_variable(&self) -> &'static str {
        self.visibility().last().and_then(|layer| layer.first()).copied().unwrap_or_default()
    }
}

/// Vendors are compared by their names.
impl PartialEq for dyn Vendor {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for dyn Vendor {}

/// The default vendor, for a host without devices: the first of [`VENDORS`].
impl Default for &'static dyn Vendor {
    fn default() -> Self {
        VENDORS[0]
    }
}

/// An accelerator of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// Name of the device in the visibility variable: a number or a UUID. Empty if the device is not usable.
    pub id: String,
    /// UUID of the device. `None` if the driver does not report it.
    pub uuid: Option<String>,
    /// Model name of the device. `None` if the driver does not report it.
    pub model: Option<String>,
    /// Memory size in bytes. `None` if neither the kernel's files nor a [`MemoryQuery`] have supplied it.
    pub memory_bytes: Option<u64>,
    /// PCI address in lower case, such as `0000:3b:00.0`.
    pub pci: Option<String>,
    /// NUMA node that the device is attached to. `None` if unknown.
    pub numa_node: Option<usize>,
    /// `true` if programs can open the device.
    pub is_usable: bool,
    /// `true` if the driver is configured to exclude the device.
    pub is_excluded: bool,
}

/// State of a vendor's driver, from the kernel's files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Driver {
    /// Version of the driver, or a substitute if the driver has none. `None` if the driver is not loaded.
    pub version: Option<String>,
    /// Number of the vendor's devices on the PCI bus, with or without a driver.
    pub on_bus: usize,
    /// Paths of the device files that programs need and that do not exist.
    pub missing_files: Vec<String>,
}

/// Names and commands for messages about a missing or incomplete driver.
#[derive(Debug)]
pub struct DriverWords {
    /// Name of the driver.
    pub driver: &'static str,
    /// Command that loads the driver.
    pub load: &'static str,
    /// Instruction for making the missing device files.
    pub make_files: &'static str,
    /// Command that makes the missing device files, or shows them.
    pub make_files_command: &'static str,
    /// The driver's library for programs. `None` if it is part of libtorch.
    pub library: Option<&'static str>,
    /// Command that shows the driver's records of broken devices.
    pub inspect: &'static str,
}

/// A program that prints the memory sizes of devices. It loads the driver's library, which may take seconds: use it in
/// diagnostics, not in launches.
#[derive(Debug)]
pub struct MemoryQuery {
    /// Possible paths of the program, tried in order until one succeeds.
    pub programs: &'static [&'static str],
    /// Arguments of the program.
    pub arguments: &'static [&'static str],
    /// Parses a line of the output into PCI address and bytes.
    pub read: fn(&str) -> Option<(String, u64)>,
}

impl MemoryQuery {
    /// Fills in the memory sizes that the program printed, for devices whose size is unknown.
    ///
    /// ```
    /// use brigade_hardware::{Device, named};
    ///
    /// let query = named("NVIDIA").unwrap().memory_query().unwrap();
    /// let mut gpus = [Device { pci: Some("0000:3b:00.0".into()), ..Device::default() }];
    /// query.fill_in(&mut gpus, "00000000:3B:00.0, 81559\n");
    /// assert_eq!(gpus[0].memory_bytes, Some(81559 << 20));
    /// ```
    pub fn fill_in(&self, devices: &mut [Device], printed: &str) {
        for (address, bytes) in printed.lines().filter_map(self.read) {
            let unknown = |it: &&mut Device| it.memory_bytes.is_none();
            let is_it = |it: &&mut Device| it.pci.as_ref() == Some(&address);
            for device in devices.iter_mut().filter(unknown).filter(is_it) {
                device.memory_bytes = Some(bytes);
            }
        }
    }
}

/// All vendors, in the order in which a host is searched for their devices.
pub const VENDORS: &[&dyn Vendor] = &[&nvidia::Nvidia, &amd::Amd, &google::Google];

/// Returns the folder where this host's file system begins: `/`, or the value of
/// [`BRIGADE_HOST_ROOT`](brigade_rank_env::env::BRIGADE_HOST_ROOT).
#[must_use]
pub fn host_root() -> PathBuf {
    let given =
        std::env::var_os(brigade_rank_env::env::BRIGADE_HOST_ROOT).filter(|it| !it.is_empty());
    given.map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

/// Returns the devices of a host, with their vendor: the first of [`VENDORS`] that has any under `root`.
#[must_use]
pub fn find(root: &Path) -> (&'static dyn Vendor, Vec<Device>) {
    let found = VENDORS.iter().map(|vendor| (*vendor, vendor.discover(root)));
    found.into_iter().find(|(_, devices)| !devices.is_empty()).unwrap_or_default()
}

/// Returns `true` if `root` may have devices that only one process can use each. Looks for their files only: a launch on a
/// host without such devices need not search for devices.
#[must_use]
pub fn may_have_devices_for_one_process(root: &Path) -> bool {
    google::may_be_in(root)
}

/// Returns the vendor with this name. `None` if there is none.
#[must_use]
pub fn named(name: &str) -> Option<&'static dyn Vendor> {
    VENDORS.iter().find(|vendor| vendor.name() == name).copied()
}

/// Returns `true` if an environment variable restricts programs to some of a host's devices. Such a value is valid only
/// on that host.
#[must_use]
pub fn is_visibility_variable(name: &str) -> bool {
    VENDORS.iter().any(|vendor| vendor.visibility().iter().any(|layer| layer.contains(&name)))
}

/// Returns the device fault, of any vendor, that a message of the kernel log reports.
///
/// ```
/// let line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=train, GPU has fallen off the bus.";
/// let fault = brigade_hardware::fault_in(line).unwrap();
/// assert_eq!((fault.code, fault.pci.as_deref()), (Some(79), Some("0000:3b:00")));
/// assert!(brigade_hardware::fault_in("eth0: link is up").is_none());
/// ```
#[must_use]
pub fn fault_in(message: &str) -> Option<Fault> {
    VENDORS.iter().find_map(|vendor| vendor.fault(message))
}

fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Returns the entries of a folder named `name0`, `name1`, ..., sorted by number.
fn numbered(folder: &Path, name: &str) -> Vec<(usize, PathBuf)> {
    let numbers = entries(folder).into_iter().filter_map(|entry| {
        let number = entry.strip_prefix(name)?.parse().ok()?;
        Some((number, folder.join(entry)))
    });
    let mut found: Vec<_> = numbers.collect();
    found.sort_unstable();
    found
}

/// Returns the number of this vendor's displays and accelerators on the PCI bus.
fn on_bus(root: &Path, vendor: &str) -> usize {
    let folder = root.join("sys/bus/pci/devices");
    let is_gpu = |device: &String| {
        let value = |file| read(&folder.join(device).join(file));
        // 0x03 is a display, 0x12 an accelerator. Switches and sound devices have other classes.
        value("vendor").is_some_and(|it| it == vendor)
            && value("class")
                .is_some_and(|class| class.starts_with("0x03") || class.starts_with("0x12"))
    };
    entries(&folder).iter().filter(|device| is_gpu(device)).count()
}

fn numa_node(root: &Path, address: &str) -> Option<usize> {
    // The value -1 (the firmware reports no node) does not parse as an index.
    read(&root.join("sys/bus/pci/devices").join(address).join("numa_node"))?.parse().ok()
}

#[cfg(test)]
mod tests;
