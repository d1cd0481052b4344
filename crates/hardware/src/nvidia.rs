//! NVIDIA GPUs, as the driver lists them in `/proc/driver/nvidia`.

mod xid;

use std::path::Path;

use super::{
    Device, Driver, DriverWords, Fault, MemoryQuery, Vendor, entries, numa_node, numbered, on_bus,
    read,
};

#[derive(Debug)]
pub(super) struct Nvidia;

impl Vendor for Nvidia {
    fn name(&self) -> &'static str {
        "NVIDIA"
    }

    /// Numbers the devices by PCI address. CUDA's own order is the same on hosts with GPUs of one kind, and everywhere
    /// with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    fn discover(&self, root: &Path) -> Vec<Device> {
        let files = numbered(&root.join("dev"), "nvidia");
        let folder = root.join(GPUS);
        let mut gpus: Vec<(String, String)> = entries(&folder)
            .into_iter()
            .map(|address| {
                let about = read(&folder.join(&address).join("information"));
                // All other PCI addresses in the system are lower-case.
                (address.to_ascii_lowercase(), about.unwrap_or_default())
            })
            .collect();
        gpus.sort_unstable();
        if gpus.is_empty() {
            // Some containers hide the driver's folder.
            let device = |number: usize| Device {
                id: number.to_string(),
                is_usable: true,
                ..Device::default()
            };
            return (0..files.len()).map(device).collect();
        }
        let mut next = 0;
        let device = |(address, about): (String, String)| {
            let is_excluded = field(&about, "GPU Excluded").is_some_and(|it| it == "Yes");
            let minor: Option<usize> = minor(&about);
            // A container may have been given only some devices: those have a device file.
            let has_file =
                files.is_empty() || minor.is_none_or(|minor| files.iter().any(|it| it.0 == minor));
            let is_usable = has_file && !is_excluded;
            let id = if is_usable { next.to_string() } else { String::new() };
            next += usize::from(is_usable);
            Device {
                id,
                // Masked until a program has used the device: "GPU-????????-...".
                uuid: field(&about, "GPU UUID").filter(|uuid| !uuid.contains('?')),
                model: field(&about, "Model").filter(|model| !model.is_empty()),
                memory_bytes: None,
                numa_node: numa_node(root, &address),
                pci: Some(address),
                is_usable,
                is_excluded,
            }
        };
        gpus.into_iter().map(device).collect()
    }

    fn visibility(&self) -> &'static [&'static [&'static str]] {
        &[&["CUDA_VISIBLE_DEVICES"]]
    }

    fn id_prefixes(&self) -> &'static [&'static str] {
        &["GPU-", MIG]
    }

    fn is_part(&self, id: &str) -> bool {
        id.starts_with(MIG)
    }

    fn default_backend(&self) -> &'static str {
        "nccl"
    }

    fn kubernetes_resource(&self) -> &'static str {
        "nvidia.com/gpu"
    }

    fn driver(&self, root: &Path, devices: &[Device]) -> Driver {
        let version = read(&root.join("proc/driver/nvidia/version")).as_deref().and_then(version);
        let mut missing_files = Vec::new();
        if version.is_some() {
            let is_there = |name: &str| root.join("dev").join(name).exists();
            let minors = devices.iter().filter(|it| !it.is_excluded).filter_map(|device| {
                let address = device.pci.as_deref()?;
                minor(&read(&root.join(GPUS).join(address).join("information"))?)
            });
            let files = minors.map(|minor| format!("nvidia{minor}"));
            let files = files.chain(["nvidiactl".to_owned(), "nvidia-uvm".to_owned()]);
            missing_files =
                files.filter(|it| !is_there(it)).map(|it| format!("/dev/{it}")).collect();
        }
        Driver { version, on_bus: on_bus(root, "0x10de"), missing_files }
    }

    fn driver_words(&self) -> &'static DriverWords {
        &DriverWords {
            driver: "NVIDIA's driver",
            load: "sudo modprobe nvidia || sudo dkms autoinstall",
            make_files: "make them; in a container, give it the GPUs (docker run --gpus all)",
            make_files_command: "sudo nvidia-modprobe -u -c 0",
            library: Some("libcuda.so.1"),
            inspect: "nvidia-smi -q -d ECC,PAGE_RETIREMENT",
        }
    }

    /// Compares CUDA's major version only: within one, newer programs run with an older driver.
    fn oldest_driver(&self, toolkit: &str) -> Option<&'static str> {
        match toolkit.split('.').next()?.parse().ok()? {
            11 => Some("450.80.02"),
            12 => Some("525.60.13"),
            13 => Some("580.65.06"),
            _ => None,
        }
    }

    fn memory_query(&self) -> Option<&'static MemoryQuery> {
        Some(&MemoryQuery {
            programs: &["/usr/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"],
            arguments: &["--query-gpu=pci.bus_id,memory.total", "--format=csv,noheader,nounits"],
            read: memory,
        })
    }

    fn fault(&self, message: &str) -> Option<Fault> {
        xid::fault(message)
    }
}

/// Returns the version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...`. The words
/// before it differ for the open driver.
fn version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// Parses a line of `nvidia-smi`, such as `00000000:3B:00.0, 81559`: an address whose domain has eight digits, and
/// memory in MiB. Returns the usual address and bytes. `None` for `[N/A]`, for GPUs that use the host's memory.
fn memory(line: &str) -> Option<(String, u64)> {
    let (address, mebibytes) = line.split_once(',')?;
    let (domain, rest) = address.trim().split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    let bytes = mebibytes.trim().parse::<u64>().ok()?.checked_mul(1 << 20)?;
    Some((format!("{domain:04x}:{}", rest.to_ascii_lowercase()), bytes))
}

/// Returns the minor number of the device file.
fn minor(about: &str) -> Option<usize> {
    field(about, "Device Minor")?.parse().ok()
}

/// Returns the value of a line `Name: \t value`.
fn field(text: &str, name: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

const GPUS: &str = "proc/driver/nvidia/gpus";
const MIG: &str = "MIG-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_by_address() {
        let of = |line: &str| memory(line);
        assert_eq!(of("00000000:3B:00.0, 81559"), Some(("0000:3b:00.0".to_owned(), 81_559 << 20)));
        assert_eq!(of("00010000:01:00.0, 24564"), Some(("10000:01:00.0".to_owned(), 24_564 << 20)));
        for line in [
            "",
            "No devices were found",
            "00000009:01:00.0, [N/A]",
            "3B, 81559",
            "x:3B:00.0, 81559",
            "00000000:3B:00.0, 99999999999999999999",
            "00000000:3B:00.0, 18446744073709551615",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }

    #[test]
    fn versions_of_both_drivers() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n\
                      GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n";
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n";
        assert_eq!(version(closed).as_deref(), Some("535.104.05"));
        assert_eq!(version(open).as_deref(), Some("580.65.06"));
        assert_eq!(version("GCC version: 12.2.0"), None);
    }
}
