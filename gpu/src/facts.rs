//! What the machine is: processor, GPUs, driver.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine, as the report names it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// The processor's model.
    pub processor: String,
    /// How many processors this process may use.
    pub cores: usize,
    /// GiB of memory.
    pub memory_gib: u64,
    /// The kernel's version.
    pub kernel: String,
    /// The GPUs, by the driver's names.
    pub gpus: Vec<Gpu>,
    /// The driver's version, where there is one.
    pub driver: Option<String>,
}

/// A GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Its model.
    pub name: String,
    /// MiB of memory, where the driver's program says it.
    pub memory_mib: Option<u64>,
    /// What else the driver's program says of it: bus, power limit, clocks, MIG and ECC modes.
    pub more: BTreeMap<String, String>,
}

/// What `brigade-selftest --facts` prints.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Probe {
    pub(crate) built_for: String,
    /// GPUs that CUDA can use.
    pub(crate) gpus: usize,
    /// Why there are none.
    pub(crate) reason: Option<String>,
}

impl Machine {
    /// Asks the kernel, and `nvidia-smi` where it is there. No library is loaded.
    pub(crate) fn gather() -> Self {
        let (gpus, driver) = by_nvidia_smi().unwrap_or_else(by_the_kernel);
        Self {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_gib(&field("/proc/meminfo", "MemTotal").unwrap_or_default()),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .map(|release| release.trim().to_owned())
                .unwrap_or_default(),
            gpus,
            driver,
        }
    }
}

/// The first field of that name in a file of lines `name : value`.
fn field(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim_start().strip_prefix(':')?.trim().to_owned())
}

fn memory_gib(text: &str) -> u64 {
    let kib = text.split_whitespace().next().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
    kib >> 20
}

fn by_nvidia_smi() -> Option<(Vec<Gpu>, Option<String>)> {
    let query = format!("--query-gpu={}", QUERY.join(","));
    let output =
        Command::new("nvidia-smi").args([&query, "--format=csv,noheader,nounits"]).output();
    let output = output.ok().filter(|it| it.status.success())?;
    parse_nvidia_smi(&String::from_utf8_lossy(&output.stdout))
}

/// One line for each GPU, with the values of [`QUERY`].
fn parse_nvidia_smi(text: &str) -> Option<(Vec<Gpu>, Option<String>)> {
    let (mut gpus, mut driver) = (Vec::new(), None);
    for line in text.lines() {
        let values: Vec<&str> = line.split(',').map(str::trim).collect();
        let [name, version, memory, rest @ ..] = values.as_slice() else { continue };
        driver = Some((*version).to_owned());
        let more = QUERY[3..].iter().zip(rest);
        let more = more.filter(|it| !it.1.starts_with('['));
        gpus.push(Gpu {
            name: (*name).to_owned(),
            memory_mib: memory.parse().ok(),
            more: more.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        });
    }
    (!gpus.is_empty()).then_some((gpus, driver))
}

/// Containers often have the driver's files and not its programs.
fn by_the_kernel() -> (Vec<Gpu>, Option<String>) {
    let folders = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let mut gpus: Vec<(String, Gpu)> = folders
        .filter_map(|folder| {
            let file = folder.path().join("information");
            let name = field(file.to_str()?, "Model")?;
            let bus = folder.file_name().to_string_lossy().into_owned();
            Some((bus, Gpu { name, ..Gpu::default() }))
        })
        .collect();
    gpus.sort_by(|a, b| a.0.cmp(&b.0));
    let version = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    (gpus.into_iter().map(|it| it.1).collect(), driver(&version))
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...`
fn driver(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// The first three are read above by their places.
const QUERY: &[&str] = &[
    "name",
    "driver_version",
    "memory.total",
    "pci.bus_id",
    "compute_cap",
    "power.limit",
    "clocks.max.sm",
    "mig.mode.current",
    "ecc.mode.current",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_gpu() {
        let text = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 00000000:3B:00.0, 9.0, 700.00, 1980, \
                    Disabled, [N/A]\n";
        let (gpus, driver) = parse_nvidia_smi(text).unwrap();
        assert_eq!(driver.as_deref(), Some("580.65.06"));
        assert_eq!(gpus.len(), 1);
        assert_eq!(
            (gpus[0].name.as_str(), gpus[0].memory_mib),
            ("NVIDIA H100 80GB HBM3", Some(81559))
        );
        assert_eq!(gpus[0].more["power.limit"], "700.00");
        assert!(!gpus[0].more.contains_key("ecc.mode.current"), "what is not known is left out");
        assert_eq!(parse_nvidia_smi("No devices were found\n"), None);
    }

    #[test]
    fn facts_of_the_kernel() {
        assert_eq!(memory_gib("131886268 kB"), 125);
        let version =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n";
        assert_eq!(driver(version).as_deref(), Some("580.65.06"));
        assert_eq!(driver(""), None);
        let machine = Machine::gather();
        assert!(machine.cores > 0 && machine.memory_gib > 0 && !machine.kernel.is_empty());
    }
}
