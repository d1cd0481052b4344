//! Facts about a host's operating system, and about its build of Brigade.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::elf::Elf;
use brigade_hardware::Sources;

/// Operating system of a host, with its build of Brigade.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Host name, as the host itself reports it.
    pub name: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Name and version of the distribution.
    pub system: String,
    /// Architecture of the brigade program, such as `x86_64`.
    pub machine: String,
    /// Build of the brigade program.
    pub brigade: Build,
}

/// Build of the brigade program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Build {
    /// Version of Brigade.
    pub version: String,
    /// Path of the executable.
    pub path: PathBuf,
    /// Build ID of the linker, which differs between builds of one version.
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
    /// Returns the build of the running program.
    #[must_use]
    pub fn this() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            path: std::env::current_exe().unwrap_or_default(),
            // Read from memory, as the path may name another file by now.
            build_id: Elf::read("/proc/self/exe".as_ref()).ok().and_then(|elf| elf.build_id),
        }
    }
}
