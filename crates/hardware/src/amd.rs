//! AMD GPUs with ROCm, found in the compute topology of the kernel driver amdgpu (`/sys/class/kfd`).

use std::path::{Path, PathBuf};

use super::{Device, Driver, DriverWords, Fault, Vendor, numa_node, numbered, on_bus, pci, read};

#[derive(Debug)]
pub(super) struct Amd;

impl Vendor for Amd {
    fn name(&self) -> &'static str {
        "AMD"
    }

    fn discover(&self, root: &Path) -> Vec<Device> {
        let nodes = numbered(&root.join("sys/class/kfd/kfd/topology/nodes"), "");
        // CPUs are nodes too, with GPU id 0. In a container, the file of a GPU that was not passed in exists but cannot
        // be read.
        let gpus = nodes.into_iter().filter(|(_, path)| {
            read(&path.join("gpu_id")).is_some_and(|id| !id.is_empty() && id != "0")
        });
        let device = |(number, (_, path)): (usize, (usize, PathBuf))| {
            let properties = read(&path.join("properties")).unwrap_or_default();
            let property = |name: &str| -> Option<u64> {
                let mut words = properties.lines().map(str::split_whitespace);
                words
                    .find_map(|mut words| (words.next()? == name).then(|| words.next())?)?
                    .parse()
                    .ok()
            };
            let pci = property("location_id").map(|location| {
                let domain = property("domain").unwrap_or(0);
                let (bus, slot) = (location >> 8 & 0xff, location >> 3 & 0x1f);
                format!("{domain:04x}:{bus:02x}:{slot:02x}.{:x}", location & 7)
            });
            let about = |file: &str| {
                let folder = root.join("sys/bus/pci/devices").join(pci.as_deref()?);
                read(&folder.join(file)).filter(|text| !text.is_empty())
            };
            Device {
                id: number.to_string(),
                uuid: property("unique_id")
                    .filter(|id| *id != 0)
                    .map(|id| format!("GPU-{id:016x}")),
                model: about("product_name").or_else(|| read(&path.join("name"))),
                memory_bytes: about("mem_info_vram_total").and_then(|bytes| bytes.parse().ok()),
                numa_node: pci.as_deref().and_then(|address| numa_node(root, address)),
                pci,
                is_usable: true,
                is_excluded: false,
            }
        };
        gpus.enumerate().map(device).collect()
    }

    /// The ROCm runtime hides devices from HIP, which numbers the remaining ones.
    fn visibility(&self) -> &'static [&'static [&'static str]] {
        &[&["ROCR_VISIBLE_DEVICES"], &["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]]
    }

    fn id_prefixes(&self) -> &'static [&'static str] {
        &["GPU-"]
    }

    fn is_part(&self, _: &str) -> bool {
        false
    }

    /// RCCL, which PyTorch for ROCm calls by NCCL's name.
    fn default_backend(&self) -> &'static str {
        "nccl"
    }

    fn kubernetes_resource(&self) -> &'static str {
        "amd.com/gpu"
    }

    fn driver(&self, root: &Path, devices: &[Device]) -> Driver {
        let module = root.join("sys/module/amdgpu");
        // The in-tree driver has no version of its own.
        let version = read(&module.join("version")).or_else(|| {
            (module.exists() || !devices.is_empty()).then(|| "of the kernel".to_owned())
        });
        let missing = version.is_some() && !devices.is_empty() && !root.join("dev/kfd").exists();
        let missing_files = missing.then(|| "/dev/kfd".to_owned()).into_iter().collect();
        Driver { version, on_bus: on_bus(root, "0x1002"), missing_files }
    }

    fn driver_words(&self) -> &'static DriverWords {
        &DriverWords {
            driver: "the driver amdgpu",
            load: "sudo modprobe amdgpu",
            make_files: "give the container the devices (docker run --device /dev/kfd --device /dev/dri)",
            make_files_command: "ls -l /dev/kfd /dev/dri",
            library: None,
            inspect: "rocm-smi --showrasinfo all",
        }
    }

    fn fault(&self, message: &str) -> Option<Fault> {
        // `amdgpu 0000:c1:00.0: amdgpu: ...`
        let rest = message.strip_prefix("amdgpu ")?;
        let (address, text) = rest.split_once(": ")?;
        let pci = pci::prefix_of(address)?;
        let (means, remedy, needs_reset) = meaning(text)?;
        Some(Fault {
            source: "amdgpu",
            code: None,
            pci: Some(pci),
            is_serious: true,
            is_consequence: false,
            needs_reset,
            means: means.to_owned(),
            remedy: remedy.to_owned(),
        })
    }
}

fn meaning(text: &str) -> Option<(&'static str, &'static str, bool)> {
    // "no uncorrectable hardware errors" and a count of 0 are all-clears.
    if let Some((before, _)) = text.split_once("uncorrectable hardware errors detected") {
        let count = before.split_whitespace().rfind(|it| *it != "new")?;
        let count: u64 = count.parse().ok()?;
        return (count > 0).then_some((
            "its memory or a cache has an error that cannot be corrected",
            "reset the GPU or restart the host; if it comes back, have the GPU replaced",
            true,
        ));
    }
    if text.contains("GPU reset begin!") {
        return Some((
            "the driver resets it, because a queue did not answer or the hardware failed: every \
             program on it is ended",
            "start the job again; if it comes back with another program, have the GPU looked at",
            false,
        ));
    }
    text.contains("page fault (").then_some((
        "a kernel of the program accessed an invalid address",
        "find the kernel with AMD_SERIALIZE_KERNEL=3",
        false,
    ))
}
