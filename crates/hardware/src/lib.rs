//! The hardware of a host, read from the kernel's files: accelerators, the network cards near them, memory with the
//! limits of control groups, and the kernel's log.
//!
//! No driver's library is loaded: loading CUDA or NVML takes longer than the rest of a launch, and a launcher that has
//! touched a device holds memory on it. A [`Vendor`] finds its devices, names the variable that makes a part of them
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

/// A maker of accelerators: one file that implements it, and a line in [`VENDORS`].
pub trait Vendor: fmt::Debug + Sync {
    /// Returns the maker's name, as messages have it.
    fn name(&self) -> &'static str;

    /// Returns the devices that the kernel shows under `root`, where the file system begins, in the
    /// order in which programs number them. Those that programs cannot open are among them, marked.
    fn discover(&self, root: &Path) -> Vec<Device>;

    /// Returns the variables that leave a program a part of the devices. Each layer numbers what the
    /// layer before has left; in a layer the first variable that is set counts. A launcher sets the
    /// first one of the last layer.
    fn visibility(&self) -> &'static [&'static [&'static str]];

    /// Returns the beginnings of names that stand for a device besides its number.
    fn id_prefixes(&self) -> &'static [&'static str];

    /// Tells whether a name is one of a part of a device, which the kernel's files do not list.
    fn is_part(&self, id: &str) -> bool;

    /// Returns the backend that carries collectives between such devices.
    fn default_backend(&self) -> &'static str;

    /// Returns what Kubernetes calls one such device in the limits of a container.
    fn kubernetes_resource(&self) -> &'static str;

    /// Returns the driver's state under `root`; `devices` are those that were found there.
    fn driver(&self, root: &Path, devices: &[Device]) -> Driver;

    /// Returns what to say of a driver that is not as it should be.
    fn driver_words(&self) -> &'static DriverWords;

    /// Returns the oldest driver with which a version of the maker's toolkit works, where that is known.
    fn oldest_driver(&self, _toolkit: &str) -> Option<&'static str> {
        None
    }

    /// Returns the program that tells the devices' memory, where the kernel's files do not.
    fn memory_query(&self) -> Option<&'static MemoryQuery> {
        None
    }

    /// Returns the fault that a message of the kernel's log reports, if it is one of such a device.
    fn fault(&self, message: &str) -> Option<Fault>;

    /// Returns the variable that a launcher sets to choose devices.
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

/// The vendor that a host without devices is taken to have: the first of [`VENDORS`].
impl Default for &'static dyn Vendor {
    fn default() -> Self {
        VENDORS[0]
    }
}

/// A device of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// Its name in the visibility variable: a number, or a UUID. Empty where it is not usable.
    pub id: String,
    /// Its UUID, where the driver tells it.
    pub uuid: Option<String>,
    /// Its model, where the driver tells it.
    pub model: Option<String>,
    /// Its memory, where the kernel's files tell it or an examination has asked: see [`MemoryQuery`].
    pub memory_bytes: Option<u64>,
    /// Its PCI address, in lower case: `0000:3b:00.0`.
    pub pci: Option<String>,
    /// The NUMA node that it is attached to, where that is known.
    pub numa_node: Option<usize>,
    /// Programs can open it.
    pub is_usable: bool,
    /// The driver was told to leave it alone.
    pub is_excluded: bool,
}

/// A driver, as the kernel shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Driver {
    /// Its version, or another word where it tells none; `None` where it is not loaded.
    pub version: Option<String>,
    /// Devices on the bus, taken by a driver or not.
    pub on_bus: usize,
    /// Device files that programs need and that are not there.
    pub missing_files: Vec<String>,
}

/// What to say of a driver that is not as it should be.
#[derive(Debug)]
pub struct DriverWords {
    /// Name of the driver.
    pub driver: &'static str,
    /// A command that loads it.
    pub load: &'static str,
    /// How missing device files are made.
    pub make_files: &'static str,
    /// A command that makes them.
    pub make_files_command: &'static str,
    /// The driver's library for programs, where that is not a part of libtorch.
    pub library: Option<&'static str>,
    /// A command that shows what the driver knows of broken devices.
    pub inspect: &'static str,
}

/// A program that tells the memory of devices. It loads the driver's library, which may take seconds: for examinations,
/// not for launches.
#[derive(Debug)]
pub struct MemoryQuery {
    /// Possible paths of the program.
    pub programs: &'static [&'static str],
    /// Arguments of the program.
    pub arguments: &'static [&'static str],
    /// Reads PCI address and bytes from a line of what it prints.
    pub read: fn(&str) -> Option<(String, u64)>,
}

impl MemoryQuery {
    /// Fills in the memory of the devices whose addresses the program has printed, where none is known.
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
pub const VENDORS: &[&dyn Vendor] = &[&nvidia::Nvidia, &amd::Amd];

/// Returns where this host's file system begins: `/`, or the folder that
/// [`BRIGADE_HOST_ROOT`](brigade_rank_env::env::BRIGADE_HOST_ROOT) names.
#[must_use]
pub fn host_root() -> PathBuf {
    let given =
        std::env::var_os(brigade_rank_env::env::BRIGADE_HOST_ROOT).filter(|it| !it.is_empty());
    given.map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

/// Finds the devices of a host: those of the first vendor that has any there, by number.
#[must_use]
pub fn find(root: &Path) -> (&'static dyn Vendor, Vec<Device>) {
    let found = VENDORS.iter().map(|vendor| (*vendor, vendor.discover(root)));
    found.into_iter().find(|(_, devices)| !devices.is_empty()).unwrap_or_default()
}

/// Returns the vendor with this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static dyn Vendor> {
    VENDORS.iter().find(|vendor| vendor.name() == name).copied()
}

/// Tells whether a variable leaves programs a part of a host's devices: such a value is right on that
/// host only.
#[must_use]
pub fn is_visibility_variable(name: &str) -> bool {
    VENDORS.iter().any(|vendor| vendor.visibility().iter().any(|layer| layer.contains(&name)))
}

/// Returns the fault of a device of any vendor that a message of the kernel's log reports.
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

/// The entries of a folder that are called `name0`, `name1`, ..., by number.
fn numbered(folder: &Path, name: &str) -> Vec<(usize, PathBuf)> {
    let numbers = entries(folder).into_iter().filter_map(|entry| {
        let number = entry.strip_prefix(name)?.parse().ok()?;
        Some((number, folder.join(entry)))
    });
    let mut found: Vec<_> = numbers.collect();
    found.sort_unstable();
    found
}

/// Displays of this vendor on the bus, and its processors for computing.
fn on_bus(root: &Path, vendor: &str) -> usize {
    let folder = root.join("sys/bus/pci/devices");
    let is_gpu = |device: &String| {
        let value = |file| read(&folder.join(device).join(file));
        // 0x03 is a display, 0x12 an accelerator; switches and sound devices are others.
        value("vendor").is_some_and(|it| it == vendor)
            && value("class")
                .is_some_and(|class| class.starts_with("0x03") || class.starts_with("0x12"))
    };
    entries(&folder).iter().filter(|device| is_gpu(device)).count()
}

fn numa_node(root: &Path, address: &str) -> Option<usize> {
    // -1 where the firmware does not say.
    read(&root.join("sys/bus/pci/devices").join(address).join("numa_node"))?.parse().ok()
}

#[cfg(test)]
mod tests;
