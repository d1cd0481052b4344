//! Google's TPUs, found on the PCI bus. Programs open a chip by `/dev/accel*`, or by its VFIO group in `/dev/vfio`.

use std::fs;
use std::path::Path;

use super::{Device, Driver, DriverWords, Fault, Vendor, entries, numa_node, numbered, read};

#[derive(Debug)]
pub(super) struct Google;

impl Vendor for Google {
    fn name(&self) -> &'static str {
        "Google"
    }

    fn device_word(&self) -> &'static str {
        "TPU"
    }

    fn is_for_one_process(&self) -> bool {
        true
    }

    /// Numbers the chips by the numbers of their device files.
    fn discover(&self, root: &Path) -> Vec<Device> {
        let mut chips = on_bus(root);
        if chips.is_empty() {
            // Some containers hide the bus.
            let device = |number: usize| Device {
                id: number.to_string(),
                is_usable: true,
                ..Device::default()
            };
            let files = numbered(&root.join("dev"), ACCEL);
            return (0..files.len()).map(device).collect();
        }
        chips.sort_by_key(|chip| chip.file.as_ref().map_or(usize::MAX, |file| file.number));
        let mut next = 0;
        let device = |chip: Chip| {
            // A container may have been given only some chips: those have a device file.
            let is_usable = chip.file.as_ref().is_some_and(|file| file.exists);
            let id = if is_usable { next.to_string() } else { String::new() };
            next += usize::from(is_usable);
            Device {
                id,
                uuid: None,
                model: Some(chip.model.name.to_owned()),
                memory_bytes: chip.model.memory_gib.map(|gib| gib << 30),
                numa_node: numa_node(root, &chip.address),
                pci: Some(chip.address),
                is_usable,
                is_excluded: false,
            }
        };
        chips.into_iter().map(device).collect()
    }

    fn visibility(&self) -> &'static [&'static [&'static str]] {
        &[&["TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"]]
    }

    fn id_prefixes(&self) -> &'static [&'static str] {
        &[]
    }

    fn is_part(&self, _: &str) -> bool {
        false
    }

    /// Messages between TPUs go through the memory of the host.
    fn default_backend(&self) -> &'static str {
        "gloo"
    }

    fn kubernetes_resource(&self) -> &'static str {
        "google.com/tpu"
    }

    fn driver(&self, root: &Path, devices: &[Device]) -> Driver {
        let chips = on_bus(root);
        let named = |chip: &Chip| {
            let link = root.join(PCI_DEVICES).join(&chip.address).join("driver");
            Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
        };
        // The driver's link may be hidden, but a device file has a driver.
        let has_file = devices.iter().any(|device| device.is_usable);
        let version = chips.iter().find_map(named);
        let version = version.or_else(|| has_file.then(|| "of the kernel".to_owned()));
        let mut missing_files = Vec::new();
        if version.is_some() {
            let files = chips.iter().filter_map(|chip| chip.file.as_ref());
            missing_files.extend(files.filter(|it| !it.exists).map(|it| format!("/{}", it.path)));
        }
        Driver { version, on_bus: chips.len(), missing_files }
    }

    fn driver_words(&self) -> &'static DriverWords {
        &DriverWords {
            driver: "the driver of TPUs",
            load: "lspci -nnk -d 1ae0:",
            make_files: "give the container the devices (docker run --privileged)",
            make_files_command: "ls -l /dev/accel* /dev/vfio",
            library: None,
            inspect: "lspci -nnk -d 1ae0:",
        }
    }

    /// No message of the drivers is known to report a broken chip.
    fn fault(&self, _: &str) -> Option<Fault> {
        None
    }
}

/// Returns `true` if device files under `root` may be those of TPUs. Does not search the bus. Other devices have VFIO
/// groups, too.
pub(super) fn may_be_in(root: &Path) -> bool {
    root.join("dev/accel0").exists() || !numbered(&root.join(VFIO), "").is_empty()
}

/// A chip on the PCI bus.
struct Chip {
    address: String,
    model: &'static Model,
    /// Device file. `None` if no driver has one for the chip.
    file: Option<DeviceFile>,
}

struct DeviceFile {
    /// Path below the root of the file system.
    path: String,
    number: usize,
    exists: bool,
}

/// Returns the chips on the bus, by PCI address.
fn on_bus(root: &Path) -> Vec<Chip> {
    let folder = root.join(PCI_DEVICES);
    let mut chips = Vec::new();
    for address in entries(&folder) {
        let value = |file| read(&folder.join(&address).join(file)).unwrap_or_default();
        // Google's network cards and disks have the same vendor.
        if value("vendor") != "0x1ae0" {
            continue;
        }
        let (id, subsystem) = (value("device"), value("subsystem_device"));
        let is_it = |it: &&Model| it.id == id && [ANY, &*subsystem].contains(&it.subsystem);
        if let Some(model) = MODELS.iter().find(is_it) {
            let file = DeviceFile::of(root, &address, chips.len());
            chips.push(Chip { address, model, file });
        }
    }
    chips
}

impl DeviceFile {
    /// Finds the device file of the chip at this address, which is number `index` on the bus.
    fn of(root: &Path, address: &str, index: usize) -> Option<Self> {
        let device = root.join(PCI_DEVICES).join(address);
        let accel = numbered(&device.join(ACCEL), ACCEL).first().map(|it| it.0);
        let group = fs::read_link(device.join("iommu_group")).ok();
        let group: Option<usize> = group.and_then(|it| it.file_name()?.to_str()?.parse().ok());
        let file = |path: String, number| {
            let exists = root.join(&path).exists();
            Self { path, number, exists }
        };
        if let Some(number) = accel {
            return Some(file(format!("dev/accel{number}"), number));
        }
        // Older drivers do not list the file with the device: the files are numbered as the chips are.
        let by_index = file(format!("dev/accel{index}"), index);
        if by_index.exists {
            return Some(by_index);
        }
        group.map(|number| file(format!("{VFIO}/{number}"), number))
    }
}

/// Kind of a chip.
struct Model {
    /// PCI device ID.
    id: &'static str,
    /// PCI subsystem ID, or [`ANY`].
    subsystem: &'static str,
    name: &'static str,
    /// Memory of the chip, by Google's tables. `None` if unknown.
    memory_gib: Option<u64>,
}

const fn model(
    id: &'static str,
    subsystem: &'static str,
    name: &'static str,
    memory_gib: Option<u64>,
) -> Model {
    Model { id, subsystem, name, memory_gib }
}

const MODELS: &[Model] = &[
    model("0x0027", "0x004e", "TPU v2", Some(16)),
    model("0x0027", "0x004f", "TPU v3", Some(32)),
    model("0x0027", ANY, "TPU v2 or v3", None),
    model("0x0056", ANY, "TPU", None),
    model("0x005e", ANY, "TPU v4", Some(32)),
    model("0x0062", ANY, "TPU v5p", Some(95)),
    model("0x0063", ANY, "TPU v5e", Some(16)),
    model("0x006f", ANY, "TPU v6e", Some(32)),
    model("0x0076", ANY, "TPU7x", Some(192)),
];
const ANY: &str = "";
const PCI_DEVICES: &str = "sys/bus/pci/devices";
const ACCEL: &str = "accel";
const VFIO: &str = "dev/vfio";
