//! NVIDIA's GPUs and driver, as the kernel shows them. No library of NVIDIA's is loaded.

use serde::{Deserialize, Serialize};

use crate::sources::Sources;

/// Devices and driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nvidia {
    /// Version of the driver that is loaded.
    pub driver: Option<String>,
    /// GPUs that the driver has taken, by number.
    pub gpus: Vec<Gpu>,
    /// GPUs on the bus, taken by a driver or not.
    pub on_bus: usize,
    /// Numbers of the device files that are there.
    pub device_files: Vec<u32>,
    /// The device file that all programs need first is there.
    pub control_file: bool,
    /// The device file for unified memory, without which CUDA does not start.
    pub memory_file: bool,
    /// The driver's library for programs is installed.
    pub library: bool,
}

/// A GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Its number, which also is that of its device file.
    pub number: u32,
    /// Its model.
    pub model: String,
    /// Its place on the bus.
    pub bus: String,
    /// The driver was told to leave it alone.
    pub excluded: bool,
}

impl Nvidia {
    pub(super) fn gather(sources: &Sources) -> Self {
        let mut gpus: Vec<Gpu> = sources
            .names("/proc/driver/nvidia/gpus")
            .into_iter()
            .filter_map(|bus| {
                let file = format!("/proc/driver/nvidia/gpus/{bus}/information");
                Some(gpu(bus, &sources.read(file)?))
            })
            .collect();
        gpus.sort_by_key(|gpu| gpu.number);
        let files = sources.names("/dev");
        let numbers = files.iter().filter_map(|name| name.strip_prefix("nvidia")?.parse().ok());
        let mut device_files: Vec<u32> = numbers.collect();
        device_files.sort_unstable();
        Self {
            driver: sources.read("/proc/driver/nvidia/version").as_deref().and_then(driver),
            gpus,
            on_bus: on_bus(sources),
            device_files,
            control_file: files.iter().any(|name| name == "nvidiactl"),
            memory_file: files.iter().any(|name| name == "nvidia-uvm"),
            library: super::loader_cache::read(sources).contains_key("libcuda.so.1")
                || LIBRARY_FOLDERS
                    .iter()
                    .any(|folder| sources.path(folder).join("libcuda.so.1").exists()),
        }
    }
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...`; the words between
/// differ for the open driver.
fn driver(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_version).map(str::to_owned)
}

fn gpu(bus: String, text: &str) -> Gpu {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim).unwrap_or_default()
    };
    Gpu {
        number: field("Device Minor").parse().unwrap_or_default(),
        model: field("Model").to_owned(),
        excluded: field("GPU Excluded") == "Yes",
        bus,
    }
}

fn on_bus(sources: &Sources) -> usize {
    let devices = sources.names("/sys/bus/pci/devices");
    let is_gpu = |device: &&String| {
        let read = |file| sources.value(format!("/sys/bus/pci/devices/{device}/{file}"));
        // Class 0x03 is a display; NVIDIA's switches and sound devices are others.
        read("vendor").is_some_and(|vendor| vendor == "0x10de")
            && read("class").is_some_and(|class| class.starts_with("0x03"))
    };
    devices.iter().filter(is_gpu).count()
}

const LIBRARY_FOLDERS: &[&str] =
    &["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_both_drivers() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n\
                      GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n";
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n";
        assert_eq!(driver(closed).as_deref(), Some("535.104.05"));
        assert_eq!(driver(open).as_deref(), Some("580.65.06"));
        assert_eq!(driver("GCC version: 12.2.0"), None);
    }

    #[test]
    fn a_host_with_two_gpus() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for (bus, minor) in [("0000:3b:00.0", 1), ("0000:af:00.0", 0)] {
            write(
                &format!("proc/driver/nvidia/gpus/{bus}/information"),
                &format!(
                    "Model: \t\t NVIDIA H100 80GB HBM3\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
                ),
            );
            write(&format!("sys/bus/pci/devices/{bus}/vendor"), "0x10de\n");
            write(&format!("sys/bus/pci/devices/{bus}/class"), "0x030200\n");
        }
        write("sys/bus/pci/devices/0000:04:00.0/vendor", "0x10de\n");
        write("sys/bus/pci/devices/0000:04:00.0/class", "0x068000\n");
        write("dev/nvidia0", "");
        write("dev/nvidiactl", "");
        write("usr/lib64/libcuda.so.1", "");
        let found = Nvidia::gather(&Sources::under(root.path()));
        assert_eq!(found.on_bus, 2);
        assert_eq!(found.device_files, [0]);
        assert!(found.control_file && !found.memory_file && found.library);
        let names: Vec<(u32, &str)> =
            found.gpus.iter().map(|gpu| (gpu.number, gpu.bus.as_str())).collect();
        assert_eq!(names, [(0, "0000:af:00.0"), (1, "0000:3b:00.0")]);
        assert_eq!(found.gpus[0].model, "NVIDIA H100 80GB HBM3");
    }
}
