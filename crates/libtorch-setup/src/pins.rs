//! Wheels that make up libtorch, by name, version and checksum: a file for each architecture.

use std::env::consts;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// Wheels that can be fetched, with version and checksum.
#[derive(Debug, Default, Deserialize)]
pub struct Pins {
    /// Version of Python in the wheels' names. The local Python may be another: it runs nothing of the wheels.
    pub(crate) python: String,
    /// Architecture of the hosts that the wheels are for. Defaults to this host's.
    #[serde(default)]
    pub(crate) architecture: Option<String>,
    cpu: Vec<Pin>,
    /// Wheels with CUDA. Empty if none are pinned.
    #[serde(default)]
    cuda: Vec<Pin>,
    /// Older versions of some of the wheels.
    #[serde(default)]
    older: Vec<Pin>,
    /// Wheels of TorchTPU. `None` if none are pinned.
    #[serde(default)]
    pub(crate) tpu: Option<TpuPins>,
}

/// Wheels of TorchTPU's backend and of the plug-ins that it can load.
#[derive(Debug, Deserialize)]
pub(crate) struct TpuPins {
    /// Versions of libtorch for which the backend has kernels.
    pub(crate) libtorch: Vec<String>,
    pub(crate) backend: Pin,
    pub(crate) plugin_tpu: Pin,
    pub(crate) plugin_cpu: Pin,
}

/// Wheel, with the files of it that are kept.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Pin {
    pub(crate) package: String,
    pub(crate) version: String,
    pub(crate) platform: String,
    pub(crate) sha256: String,
    pub(crate) download_bytes: u64,
    pub(crate) installed_bytes: u64,
    /// Shell patterns of the files that are kept; `*` also matches `/`. A wheel in `older` uses those of the newer
    /// version.
    #[serde(default)]
    pub(crate) keep: Vec<String>,
}

/// Contents of an installation: the wheels of one product.
pub(crate) struct Contents<'a> {
    /// Name of the product, such as `libtorch`.
    pub(crate) product: &'static str,
    /// Name with version and kind, such as `libtorch 2.13.0 (cpu)`.
    pub(crate) name: String,
    /// End of a message about a failed fetch: what the user can do instead. Empty if there is no other way.
    pub(crate) instead: &'static str,
    /// Version of Python in the wheels' names, such as `311`.
    pub(crate) python: &'a str,
    pub(crate) wheels: Vec<&'a Pin>,
}

/// The architectures of hosts for which wheels are pinned.
const ARCHITECTURES: [(&str, &str); 2] =
    [("x86_64", include_str!("pins/x86_64.json")), ("aarch64", include_str!("pins/aarch64.json"))];

/// Kind of an installation. A CUDA installation also works on CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Installation for CPUs: on x86-64 540 MB to download and 484 MB on disk, on aarch64 440 MB and 345 MB.
    Cpu,
    /// Installation for CPUs and CUDA, with the headers for the feature `cuda`: 2.5 GB to download, 3.6 GB on disk.
    Cuda,
}

impl Pins {
    /// Returns the wheels for which this version of Brigade was made, on this host's architecture. Empty if none are
    /// pinned for it; the user then provides a libtorch.
    ///
    /// # Errors
    /// Never fails in a release: the file is part of this crate, and a test reads it.
    pub fn embedded() -> Result<Self> {
        Self::for_architecture(consts::ARCH)
    }

    /// Returns the wheels for hosts of another architecture, such as `aarch64`, to cross-compile for them. Empty if
    /// none are pinned.
    ///
    /// # Errors
    /// Never fails in a release: the files are parts of this crate, and a test reads them.
    pub fn for_architecture(name: &str) -> Result<Self> {
        let Some((_, text)) = ARCHITECTURES.iter().find(|it| it.0 == name) else {
            return Ok(Self::default());
        };
        serde_json::from_str(text).with_context(|| format!("pins/{name}.json is malformed"))
    }

    /// Fails if there are no wheels of a kind for this host.
    pub(crate) fn check_host(&self, kind: Kind) -> Result<()> {
        let (system, architecture) = (consts::OS, consts::ARCH);
        if system != "linux" || self.cpu.is_empty() {
            let known = ARCHITECTURES.map(|it| it.0).join(" and ");
            bail!(
                "libtorch is fetched for Linux on {known} only, and this is {system} on {architecture}: set \
                 LIBTORCH to an installed libtorch, or LIBTORCH_USE_PYTORCH=1 where Python has PyTorch"
            );
        }
        if kind == Kind::Cuda && self.cuda.is_empty() {
            bail!(
                "no libtorch for CUDA is fetched on {architecture}: set LIBTORCH_USE_PYTORCH=1 where Python has \
                 PyTorch with CUDA"
            );
        }
        Ok(())
    }

    /// Returns the wheels of libtorch 2.11 for CUDA, the oldest version that Brigade supports.
    ///
    /// # Errors
    /// Never fails in a release: the file is part of this crate, and a test reads it.
    pub fn embedded_older() -> Result<Self> {
        let mut pins = Self::embedded()?;
        for older in std::mem::take(&mut pins.older) {
            for pin in pins.cpu.iter_mut().chain(&mut pins.cuda) {
                if pin.package == older.package {
                    let keep = std::mem::take(&mut pin.keep);
                    *pin = Pin { keep, ..older.clone() };
                }
            }
        }
        Ok(pins)
    }

    /// Reads pins from another file, for tests of the fetch.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or does not have the format of `pins/x86_64.json`.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is malformed", path.display()))
    }

    /// Returns the wheels of one kind of installation, libtorch itself first.
    pub(crate) fn of(&self, kind: Kind) -> Vec<&Pin> {
        match kind {
            Kind::Cpu => self.cpu.iter().collect(),
            Kind::Cuda => {
                let replaced = |pin: &&Pin| !self.cuda.iter().any(|it| it.package == pin.package);
                self.cuda.iter().chain(self.cpu.iter().filter(replaced)).collect()
            }
        }
    }

    /// Returns the contents of one kind of installation.
    pub(crate) fn contents(&self, kind: Kind) -> Contents<'_> {
        Contents {
            product: "libtorch",
            name: format!("libtorch {} ({})", self.libtorch_version(), kind.name()),
            instead: ", or set LIBTORCH to an installed libtorch",
            python: &self.python,
            wheels: self.of(kind),
        }
    }

    /// Returns the version of libtorch, such as `2.13.0`.
    #[must_use]
    pub fn libtorch_version(&self) -> &str {
        self.cpu.first().map_or("", |pin| &pin.version)
    }
}

impl Pin {
    /// Returns the requirement for pip: `torch==2.13.0`.
    pub(crate) fn requirement(&self) -> String {
        format!("{}=={}", self.package, self.version)
    }

    /// Returns the oldest version of glibc that the wheel runs with: 2.28 for the platform `manylinux_2_28_x86_64`.
    pub(crate) fn glibc(&self) -> Option<(u32, u32)> {
        let mut parts = self.platform.strip_prefix("manylinux_")?.split('_');
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// Returns the peak of the disk space, in bytes, that fetching these wheels needs.
///
/// A wheel is unpacked and deleted before the next one is fetched. pip downloads into its own folder and copies from
/// there, so for a moment a wheel exists twice.
pub(crate) fn peak_bytes(pins: &[&Pin]) -> u64 {
    let mut kept = 0;
    let mut peak = 0;
    for pin in pins {
        peak = peak
            .max(kept + 2 * pin.download_bytes)
            .max(kept + pin.download_bytes + pin.installed_bytes);
        kept += pin.installed_bytes;
    }
    // File systems round the size of each of ten thousand headers up to a block.
    peak + peak / 20
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin(package: &str, download_bytes: u64, installed_bytes: u64) -> Pin {
        Pin {
            package: package.to_owned(),
            version: "1".to_owned(),
            platform: String::new(),
            sha256: String::new(),
            download_bytes,
            installed_bytes,
            keep: Vec::new(),
        }
    }

    #[test]
    fn cuda_replaces_packages_of_the_same_name() {
        let pins = Pins {
            python: String::new(),
            architecture: None,
            cpu: vec![pin("torch", 1, 1), pin("cupti", 1, 1)],
            cuda: vec![pin("torch", 1, 9), pin("nccl", 1, 1)],
            older: Vec::new(),
            tpu: None,
        };
        let names = |kind| -> Vec<(String, u64)> {
            pins.of(kind).iter().map(|it| (it.package.clone(), it.installed_bytes)).collect()
        };
        let owned = |list: &[(&str, u64)]| -> Vec<(String, u64)> {
            list.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
        };
        assert_eq!(names(Kind::Cpu), owned(&[("torch", 1), ("cupti", 1)]));
        assert_eq!(names(Kind::Cuda), owned(&[("torch", 9), ("nccl", 1), ("cupti", 1)]));
    }

    #[test]
    fn the_peak_counts_what_lies_there_at_once() {
        let (first, second) = (pin("a", 1000, 400), pin("b", 200, 5000));
        // 2 x 1000 while pip copies; then 400 + 200 + 5000.
        assert_eq!(peak_bytes(&[&first]), 2100);
        assert_eq!(peak_bytes(&[&first, &second]), 5880);
    }

    #[test]
    fn the_embedded_pins_are_well_formed_and_of_one_version_on_all_architectures() {
        let versions = ARCHITECTURES.map(|(name, _)| {
            let pins = Pins::for_architecture(name).unwrap();
            well_formed(&pins);
            assert_eq!(pins.architecture.as_deref(), Some(name));
            assert!(pins.of(Kind::Cpu).iter().all(|pin| pin.platform.ends_with(name)), "{name}");
            pins.libtorch_version().to_owned()
        });
        assert_eq!(versions[0], versions[1]);
        let error = Pins::for_architecture("riscv64").unwrap().check_host(Kind::Cpu).unwrap_err();
        assert!(error.to_string().contains("x86_64 and aarch64 only"), "{error}");
        let arm = Pins::for_architecture("aarch64").unwrap();
        assert!(arm.check_host(Kind::Cuda).unwrap_err().to_string().contains("PyTorch with CUDA"));
    }

    #[test]
    fn the_older_pins_keep_the_same_files() {
        let older = Pins::embedded_older().unwrap();
        well_formed(&older);
        assert_eq!(older.libtorch_version(), "2.11.0");
        let newer = Pins::embedded().unwrap();
        for (older, newer) in older.of(Kind::Cuda).into_iter().zip(newer.of(Kind::Cuda)) {
            assert_eq!((&older.package, &older.keep), (&newer.package, &newer.keep));
        }
    }

    fn well_formed(pins: &Pins) {
        for pin in pins.of(Kind::Cpu).into_iter().chain(pins.of(Kind::Cuda)) {
            let hex = pin.sha256.len() == 64 && pin.sha256.chars().all(|c| c.is_ascii_hexdigit());
            assert!(hex, "{}: {}", pin.package, pin.sha256);
            assert!(pin.download_bytes > 0 && pin.installed_bytes > 0, "{}", pin.package);
        }
        assert_eq!(pins.of(Kind::Cpu)[0].package, "torch");
        assert!(pins.cuda.first().is_none_or(|it| it.version == pins.libtorch_version()));
    }
}
