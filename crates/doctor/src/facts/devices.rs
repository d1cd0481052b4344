//! Facts about accelerators and their driver, as the kernel shows them. No vendor library is loaded; for the rest a
//! vendor program is run.

use std::path::PathBuf;

use brigade_hardware::{Device, Driver, NearNic, Sources, Vendor};
use brigade_libtorch_setup::{TpuFiles, TpuPlugin};
use serde::{Deserialize, Serialize};

/// Devices of one kind, with their driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Devices {
    /// Name of the vendor.
    pub kind: String,
    /// Driver that is loaded.
    pub driver: Driver,
    /// `true` if the driver's user-space library is installed, or the driver has none.
    pub library: bool,
    /// Devices, by index.
    pub gpus: Vec<Gpu>,
    /// Version of the TorchTPU that `brigade setup --tpu` has fetched. `None` also for devices that do not need it.
    pub torch_tpu: Option<String>,
}

/// Device with the distances to the network cards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Properties of the device.
    pub device: Device,
    /// All network cards, the nearest first. Empty if the device's position on the bus is unknown.
    pub nics: Vec<NearNic>,
}

impl Devices {
    pub(super) fn gather(sources: &Sources) -> Self {
        let root = sources.root();
        let (mut kind, mut found) = brigade_hardware::find(root);
        let mut driver = kind.driver(root, &found);
        if found.is_empty() {
            // Either a driver without devices, or devices without a driver.
            let driven =
                brigade_hardware::VENDORS.iter().map(|kind| (*kind, kind.driver(root, &[])));
            let known =
                |(_, it): &(&'static dyn Vendor, Driver)| it.version.is_some() || it.on_bus > 0;
            (kind, driver) = driven.into_iter().find(known).unwrap_or((kind, driver));
        }
        let is_unknown = |it: &Device| it.is_usable && it.memory_bytes.is_none();
        if let Some(query) = kind.memory_query().filter(|_| found.iter().any(is_unknown)) {
            let mut programs = query.programs.iter();
            if let Some(text) = programs.find_map(|it| sources.output(it, query.arguments)) {
                query.fill_in(&mut found, &text);
            }
        }
        let nics = brigade_hardware::nics(root);
        let gpu = |device: Device| Gpu {
            nics: brigade_hardware::of_device(root, &device, &nics),
            device,
        };
        Self {
            kind: kind.name().to_owned(),
            driver,
            library: kind.driver_words().library.is_none_or(|it| is_installed(sources, it)),
            gpus: found.into_iter().map(gpu).collect(),
            torch_tpu: kind.is_for_one_process().then(|| torch_tpu(sources)).flatten(),
        }
    }

    /// Returns the vendor. Falls back to the first known one if the host reported none that is known.
    #[must_use]
    pub fn kind(&self) -> &'static dyn Vendor {
        brigade_hardware::named(&self.kind).unwrap_or_default()
    }

    /// Returns `true` if the host has devices that use NCCL for collectives.
    #[must_use]
    pub fn use_nccl(&self) -> bool {
        !self.gpus.is_empty() && self.kind().default_backend() == "nccl"
    }

    /// Returns the memory of each device in bytes, if it is known and equal for all.
    #[must_use]
    pub fn memory_of_each(&self) -> Option<u64> {
        let mut all = self.gpus.iter().map(|gpu| gpu.device.memory_bytes);
        let first = all.next()??;
        all.all(|it| it == Some(first)).then_some(first)
    }

    /// Returns the number of devices that programs can open.
    #[must_use]
    pub fn usable(&self) -> usize {
        self.gpus.iter().filter(|gpu| gpu.device.is_usable).count()
    }
}

impl Gpu {
    /// Returns the model name of the device.
    #[must_use]
    pub fn model(&self) -> &str {
        self.device.model.as_deref().unwrap_or("device of an unknown model")
    }
}

/// Returns the version of TorchTPU in the user's cache, if a plug-in for TPUs is there, too.
fn torch_tpu(sources: &Sources) -> Option<String> {
    let absolute = |name| sources.variable(name).map(PathBuf::from).filter(|it| it.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    let files = TpuFiles::find_in(&sources.path(cache.join("brigade")))?;
    files.has(TpuPlugin::Tpu).then(|| files.version().to_owned())
}

fn is_installed(sources: &Sources, library: &str) -> bool {
    super::loader_cache::read(sources).contains_key(library)
        || LIBRARY_FOLDERS.iter().any(|folder| sources.path(folder).join(library).exists())
}

const LIBRARY_FOLDERS: &[&str] =
    &["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_both_kinds_and_of_none() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let gather = || Devices::gather(&Sources::under(root.path()));
        let none = gather();
        assert_eq!((none.kind.as_str(), none.gpus.len(), none.library), ("NVIDIA", 0, false));
        write("sys/bus/pci/devices/0000:c1:00.0/vendor", "0x1002\n");
        write("sys/bus/pci/devices/0000:c1:00.0/class", "0x120000\n");
        let undriven = gather();
        assert_eq!((undriven.kind.as_str(), undriven.driver.on_bus), ("AMD", 1));
        assert!(undriven.driver.version.is_none() && undriven.library);
        write(
            "proc/driver/nvidia/gpus/0000:3b:00.0/information",
            "Model: \t H100\nDevice Minor: 0\n",
        );
        write("proc/driver/nvidia/version", "NVRM version: NVIDIA  580.65.06\n");
        write("usr/lib64/libcuda.so.1", "");
        let found = gather();
        assert_eq!((found.kind.as_str(), found.usable(), found.library), ("NVIDIA", 1, true));
        assert_eq!(
            found.driver.missing_files,
            ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]
        );
        assert_eq!(found.gpus[0].model(), "H100");
        assert_eq!(found.memory_of_each(), None);
    }

    #[test]
    fn tpus_with_torch_tpu() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n");
        write("sys/bus/pci/devices/0000:00:04.0/device", "0x006f\n");
        write("dev/accel0", "");
        let sources = Sources::under(root.path()).with_variable("HOME", "/users/me");
        let found = Devices::gather(&sources);
        assert_eq!((found.kind.as_str(), found.usable(), found.library), ("Google", 1, true));
        assert_eq!((found.gpus[0].model(), found.memory_of_each()), ("TPU v6e", Some(32 << 30)));
        assert_eq!(found.torch_tpu, None);
        assert!(!found.use_nccl());
    }

    #[test]
    fn memory_is_asked_of_the_makers_program() {
        use std::os::unix::fs::PermissionsExt;

        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        for (minor, address) in ["0000:3b:00.0", "0000:86:00.0"].into_iter().enumerate() {
            let file = format!("proc/driver/nvidia/gpus/{address}/information");
            write(&file, &format!("Model: \t H100\nDevice Minor: {minor}\n"));
        }
        let memory = || {
            let found = Devices::gather(&Sources::under(root.path()));
            let all: Vec<_> = found.gpus.iter().map(|gpu| gpu.device.memory_bytes).collect();
            (all, found.memory_of_each())
        };
        assert_eq!(memory(), (vec![None, None], None));
        let script = |body: &str| write("usr/bin/nvidia-smi", &format!("#!/bin/sh\n{body}\n"));
        script("echo 'Failed to initialize NVML'; exit 9");
        assert_eq!(memory(), (vec![None, None], None));
        script(
            "[ \"$1\" = --query-gpu=pci.bus_id,memory.total ] && echo '00000000:86:00.0, 81559'",
        );
        assert_eq!(memory(), (vec![None, Some(81_559 << 20)], None));
        script("echo '00000000:3B:00.0, 81559'; echo '00000000:86:00.0, 81559'");
        assert_eq!(memory(), (vec![Some(81_559 << 20); 2], Some(81_559 << 20)));
    }
}
