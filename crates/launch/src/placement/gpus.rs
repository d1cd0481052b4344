//! The GPUs of this host in the kernel's own files, found without a driver's library.
//!
//! Loading CUDA or NVML takes longer than the whole launch does otherwise, and a launcher that has
//! touched a device holds memory on it.

use std::fs;
use std::path::{Path, PathBuf};

use super::Device;
use super::topology::{numbered, read};

/// All of them, by number; `root` is where the file system begins.
pub(super) fn present(root: &Path) -> Vec<Device> {
    let gpus = nvidia(root);
    if gpus.is_empty() { amd(root) } else { gpus }
}

fn nvidia(root: &Path) -> Vec<Device> {
    let nodes = numbered(&root.join("dev"), "nvidia");
    let mut gpus: Vec<_> = entries(&root.join("proc/driver/nvidia/gpus"))
        .into_iter()
        .map(|address| {
            let about = root.join("proc/driver/nvidia/gpus").join(&address).join("information");
            // PCI addresses are lower-case everywhere else.
            (address.to_ascii_lowercase(), read(&about).unwrap_or_default())
        })
        // A container may have been given some of them only: those have a device file.
        .filter(|(_, about)| {
            let minor = field(about, "Device Minor").and_then(|minor| minor.parse().ok());
            nodes.is_empty() || minor.is_none_or(|minor: usize| nodes.iter().any(|n| n.0 == minor))
        })
        .collect();
    gpus.sort_unstable();
    if gpus.is_empty() {
        let device = |number: usize| Device { id: number.to_string(), ..Device::default() };
        return (0..nodes.len()).map(device).collect();
    }
    let device = |(number, (address, about)): (usize, (String, String))| Device {
        id: number.to_string(),
        // Unset until something has used the device: "GPU-????????-...".
        uuid: field(&about, "GPU UUID").filter(|uuid| !uuid.contains('?')),
        numa_node: numa_node(root, &address),
    };
    gpus.into_iter().enumerate().map(device).collect()
}

/// AMD's, as its kernel driver lists them among all that computes.
fn amd(root: &Path) -> Vec<Device> {
    let nodes = numbered(&root.join("sys/class/kfd/kfd/topology/nodes"), "");
    let gpus = nodes.into_iter().filter(|(_, path)| {
        read(&path.join("gpu_id")).is_some_and(|id| !id.is_empty() && id != "0")
    });
    let device = |(number, (_, path)): (usize, (usize, PathBuf))| {
        let properties = read(&path.join("properties")).unwrap_or_default();
        let property = |name: &str| -> Option<u32> {
            let mut words = properties.lines().map(str::split_whitespace);
            words.find_map(|mut words| (words.next()? == name).then(|| words.next())?)?.parse().ok()
        };
        let address = property("location_id").map(|location| {
            let domain = property("domain").unwrap_or(0);
            format!(
                "{domain:04x}:{:02x}:{:02x}.{:x}",
                location >> 8 & 0xff,
                location >> 3 & 0x1f,
                location & 7
            )
        });
        let numa_node = address.and_then(|address| numa_node(root, &address));
        Device { id: number.to_string(), uuid: None, numa_node }
    };
    gpus.enumerate().map(device).collect()
}

fn numa_node(root: &Path, address: &str) -> Option<usize> {
    // -1 where the firmware does not say.
    read(&root.join("sys/bus/pci/devices").join(address).join("numa_node"))?.parse().ok()
}

fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

/// `Name: \t value`
fn field(text: &str, name: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    /// Four GPUs, whose minor numbers do not follow their addresses.
    pub(in super::super) fn four() -> tempfile::TempDir {
        let about = |minor: usize, uuid: &str| {
            format!("Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
        };
        tree(&[
            ("proc/driver/nvidia/gpus/0000:19:00.0/information", &about(1, "GPU-aaaa")),
            ("proc/driver/nvidia/gpus/0000:3B:00.0/information", &about(0, "GPU-abbb")),
            ("proc/driver/nvidia/gpus/0000:9b:00.0/information", &about(2, "GPU-????????")),
            ("proc/driver/nvidia/gpus/0001:00:00.0/information", ""),
            ("sys/bus/pci/devices/0000:19:00.0/numa_node", "0\n"),
            ("sys/bus/pci/devices/0000:3b:00.0/numa_node", "0\n"),
            ("sys/bus/pci/devices/0000:9b:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0001:00:00.0/numa_node", "-1\n"),
            ("dev/nvidia0", ""),
            ("dev/nvidia1", ""),
            ("dev/nvidia2", ""),
            ("dev/nvidia3", ""),
            ("dev/nvidiactl", ""),
            ("dev/nvidia-uvm", ""),
        ])
    }

    fn ids(gpus: &[Device]) -> Vec<&str> {
        gpus.iter().map(|gpu| gpu.id.as_str()).collect()
    }

    fn uuids(gpus: &[Device]) -> Vec<Option<&str>> {
        gpus.iter().map(|gpu| gpu.uuid.as_deref()).collect()
    }

    #[test]
    fn the_drivers_files() {
        let gpus = present(four().path());
        assert_eq!(ids(&gpus), ["0", "1", "2", "3"]);
        let nodes: Vec<_> = gpus.iter().map(|gpu| gpu.numa_node).collect();
        assert_eq!(nodes, [Some(0), Some(0), Some(1), None]);
        assert_eq!(uuids(&gpus), [Some("GPU-aaaa"), Some("GPU-abbb"), None, None]);
    }

    #[test]
    fn a_container_with_some_of_the_devices() {
        let root = four();
        for gone in ["nvidia0", "nvidia3"] {
            fs::remove_file(root.path().join("dev").join(gone)).unwrap();
        }
        // The one whose minor number is not known stays.
        assert_eq!(uuids(&present(root.path())), [Some("GPU-aaaa"), None, None]);
        // Without the driver's folder, the device files count.
        fs::remove_dir_all(root.path().join("proc")).unwrap();
        assert_eq!(ids(&present(root.path())), ["0", "1"]);
        assert_eq!(present(tree(&[]).path()), []);
    }

    #[test]
    fn amds_driver() {
        let root = tree(&[
            ("sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0\n"),
            ("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "51245\n"),
            (
                "sys/class/kfd/kfd/topology/nodes/1/properties",
                "simd_count 440\nlocation_id 49408\ndomain 0\n",
            ),
            ("sys/class/kfd/kfd/topology/nodes/2/gpu_id", "5678\n"),
            ("sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n"),
        ]);
        let gpus = present(root.path());
        let found: Vec<_> = gpus.iter().map(|gpu| (gpu.id.as_str(), gpu.numa_node)).collect();
        assert_eq!(found, [("0", Some(1)), ("1", None)]);
    }
}
