//! pins.json: the wheels that make up libtorch, by name, version and checksum.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

/// The wheels that can be fetched, with version and checksum.
#[derive(Debug, Deserialize)]
pub struct Pins {
    /// Python's version in the wheels' names. The local Python may be another: nothing of the
    /// wheels is run by it.
    pub(crate) python: String,
    cpu: Vec<Pin>,
    cuda: Vec<Pin>,
    /// Another version of some of them.
    #[serde(default)]
    older: Vec<Pin>,
}

/// One wheel and what is kept of it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Pin {
    pub(crate) package: String,
    pub(crate) version: String,
    pub(crate) platform: String,
    pub(crate) sha256: String,
    pub(crate) download_bytes: u64,
    pub(crate) installed_bytes: u64,
    /// Shell patterns of the files that are kept; `*` also matches `/`. Those of `older` are the other version's.
    #[serde(default)]
    pub(crate) keep: Vec<String>,
}

/// What an install is good for. One for CUDA serves CPU work, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// libtorch for CPUs: 540 MB to download, 484 MB on disk.
    Cpu,
    /// And what CUDA needs, headers for the feature `cuda` included: 2.5 GB, 3.6 GB on disk.
    Cuda,
}

impl Pins {
    /// Those that this version of Brigade was made for.
    ///
    /// # Errors
    /// Never: the file is a part of this crate, and a test reads it.
    pub fn embedded() -> Result<Self> {
        serde_json::from_str(include_str!("pins.json")).context("pins.json is malformed")
    }

    /// Those of libtorch 2.11 for CUDA, the oldest that Brigade is built with.
    ///
    /// # Errors
    /// Never: the file is a part of this crate, and a test reads it.
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

    /// Those of another file, for tests of the fetch.
    ///
    /// # Errors
    /// The file cannot be read, or is not what `pins.json` is.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is malformed", path.display()))
    }

    /// The wheels of one kind of install, libtorch itself first.
    pub(crate) fn of(&self, kind: Kind) -> Vec<&Pin> {
        match kind {
            Kind::Cpu => self.cpu.iter().collect(),
            Kind::Cuda => {
                let replaced = |pin: &&Pin| !self.cuda.iter().any(|it| it.package == pin.package);
                self.cuda.iter().chain(self.cpu.iter().filter(replaced)).collect()
            }
        }
    }

    /// The version of libtorch among them, such as `2.13.0`.
    #[must_use]
    pub fn libtorch_version(&self) -> &str {
        self.cpu.first().map_or("", |pin| &pin.version)
    }
}

impl Pin {
    /// As pip writes it: `torch==2.13.0`.
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

/// Free bytes that fetching these wheels takes at its peak.
///
/// A wheel is unpacked and deleted before the next one is fetched. pip downloads into its own
/// folder and copies from there, so for a moment a wheel is there twice.
pub(crate) fn peak_bytes(pins: &[&Pin]) -> u64 {
    let mut kept = 0;
    let mut peak = 0;
    for pin in pins {
        peak = peak
            .max(kept + 2 * pin.download_bytes)
            .max(kept + pin.download_bytes + pin.installed_bytes);
        kept += pin.installed_bytes;
    }
    // File systems round each of ten thousand headers up to a block.
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
