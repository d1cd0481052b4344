//! The system of a host, and which build of our own program runs there.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::elf::Elf;
use brigade_hardware::Sources;

/// The system.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// What the host calls itself.
    pub name: String,
    /// Release of the kernel.
    pub kernel: String,
    /// The distribution, in its own words.
    pub system: String,
    /// Architecture of our program, such as `x86_64`.
    pub machine: String,
    /// Our own program.
    pub brigade: Build,
}

/// A build of our own program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Build {
    /// Its version.
    pub version: String,
    /// Its file.
    pub path: PathBuf,
    /// What the linker has stamped it with: differs between builds of one version.
    pub build_id: Option<String>,
}

impl Host {
    pub(super) fn gather(sources: &Sources) -> Self {
        let release = sources.read("/etc/os-release").unwrap_or_default();
        let system = release
            .lines()
            .find_map(|line| line.strip_prefix("PRETTY_NAME="))
            .map(|name| name.trim_matches('"').to_owned());
        Self {
            name: sources.value("/proc/sys/kernel/hostname").unwrap_or_default(),
            kernel: sources.value("/proc/sys/kernel/osrelease").unwrap_or_default(),
            system: system.unwrap_or_default(),
            machine: std::env::consts::ARCH.to_owned(),
            brigade: Build::this(),
        }
    }
}

impl Build {
    /// The program that runs this.
    #[must_use]
    pub fn this() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            path: std::env::current_exe().unwrap_or_default(),
            // Not by its path: that may name another file by now.
            build_id: Elf::read("/proc/self/exe".as_ref()).ok().and_then(|elf| elf.build_id),
        }
    }
}
