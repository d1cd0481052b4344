//! Parser of pins.json: the wheels that make up libtorch, by name, version and checksum.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

/// Wheels that can be fetched, with version and checksum.
#[derive(Debug, Deserialize)]
pub struct Pins {
    /// Version of Python in the wheels' names. The local Python may be another: it runs nothing of the wheels.
    pub(crate) python: String,
    cpu: Vec<Pin>,
    cuda: Vec<Pin>,
    /// Older versions of some of the wheels.
    #[serde(default)]
    older: Vec<Pin>,
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

/// Kind of an installation. One for CUDA also serves CPU work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Installation for CPUs: 540 MB to download, 484 MB on disk.
    Cpu,
    /// Installation for CPUs and CUDA, with the headers for the feature `cuda`: 2.5 GB to download, 3.6 GB on disk.
    Cuda,
}

impl Pins {
    /// Returns the wheels for which this version of Brigade was made.
    ///
    /// # Errors
    /// Does not fail: the file is part of this crate, and a test reads it.
    pub fn embedded() -> Result<Self> {
        serde_json::from_str(include_str!("pins.json")).context("pins.json is malformed")
    }

    /// Returns the wheels of libtorch 2.11 for CUDA, the oldest version that Brigade supports.
    ///
    /// # Errors
    /// Does not fail: the file is part of this crate, and a test reads it.
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
    /// Fails if the file cannot be read, or does not have the format of `pins.json`.
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
            cpu: vec![pin("torch", 1, 1), pin("cupti", 1, 1)],
            cuda: vec![pin("torch", 1, 9), pin("nccl", 1, 1)],
            older: Vec::new(),
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
    fn the_embedded_pins_are_well_formed() {
        well_formed(&Pins::embedded().unwrap());
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
        assert_eq!(pins.of(Kind::Cuda)[0].version, pins.libtorch_version());
    }
}
