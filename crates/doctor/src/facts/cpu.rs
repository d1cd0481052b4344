//! Facts about processors: their number, and how many this process may use.

use serde::{Deserialize, Serialize};

use brigade_hardware::Sources;
use brigade_hardware::cgroup;

/// Processors of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cpu {
    /// Model name, as the kernel reports it.
    pub model: String,
    /// Number of processors that are online.
    pub online: usize,
    /// Number of processors that this process may run on.
    pub usable: usize,
    /// CPU quota of the control group, in processors.
    pub quota: Option<f64>,
    /// Number of NUMA nodes.
    pub numa_nodes: usize,
    /// Widest vector instructions of the processor.
    pub vectors: Vectors,
    /// Load average: processes that were ready to run, averaged over the last minute.
    pub load: f64,
}

/// Vector instructions, which decide the last digits of sums and products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vectors {
    /// Unknown: not an x86 processor, or one without readable flags.
    #[default]
    Unknown,
    /// An x86 processor without AVX2.
    Older,
    /// AVX2 and FMA instructions.
    Avx2,
    /// AVX-512 instructions without AMX.
    Avx512,
    /// AVX-512 and the matrix units of AMX.
    Amx,
}

impl Vectors {
    /// Determines the instructions from the x86 flags in Linux's `/proc/cpuinfo`.
    fn of(flags: &str) -> Self {
        let has = |name| flags.split_whitespace().any(|flag| flag == name);
        match () {
            () if has("amx_tile") => Self::Amx,
            () if has("avx512f") => Self::Avx512,
            () if has("avx2") && has("fma") => Self::Avx2,
            () => Self::Older,
        }
    }

    /// Returns the word that reports use.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Unknown => "unknown instructions",
            Self::Older => "no AVX2",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
            Self::Amx => "AMX",
        }
    }
}

impl Cpu {
    pub(super) fn gather(sources: &Sources) -> Self {
        let info = sources.read("/proc/cpuinfo").unwrap_or_default();
        let status = sources.read("/proc/self/status").unwrap_or_default();
        let online = sources.value("/sys/devices/system/cpu/online").map(|list| count(&list));
        let counted = info.lines().filter(|line| line.starts_with("processor")).count();
        let online = online.filter(|count| *count > 0).unwrap_or(counted);
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let nodes = sources.names("/sys/devices/system/node");
        let load = sources.value("/proc/loadavg").unwrap_or_default();
        Self {
            model: info
                .lines()
                .find(|line| line.starts_with("model name"))
                .and_then(|line| line.split_once(':'))
                .map(|(_, name)| name.trim().to_owned())
                .unwrap_or_default(),
            vectors: info
                .lines()
                .find(|line| line.starts_with("flags"))
                .and_then(|line| line.split_once(':'))
                .map_or(Vectors::Unknown, |(_, flags)| Vectors::of(flags)),
            online,
            // The list may contain processors that are offline.
            usable: allowed.map_or(online, |list| count(list.trim()).min(online)),
            quota: quota(sources),
            numa_nodes: nodes
                .iter()
                .filter_map(|name| name.strip_prefix("node"))
                .filter(|number| number.parse::<u32>().is_ok())
                .count(),
            load: load.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or_default(),
        }
    }
}

/// Counts the members of a list such as `0-3,8`.
fn count(list: &str) -> usize {
    list.split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            Some((last + 1).saturating_sub(first))
        })
        .sum()
}

/// Returns the smallest quota of the control groups that contain this process.
fn quota(sources: &Sources) -> Option<f64> {
    let groups = cgroup::of(sources, "cpu");
    let quotas = groups.folders.iter().filter_map(|folder| {
        let (quota, period) = if groups.unified {
            let text = sources.value(folder.join("cpu.max"))?;
            let (quota, period) = text.split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        } else {
            let read = |name| sources.value(folder.join(name));
            (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?)
        };
        let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
        (quota > 0.0 && period > 0.0).then_some(quota / period)
    });
    quotas.min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_counted() {
        for (list, expected) in [("0", 1), ("0-3", 4), ("0-3,8,10-11", 7), ("", 0), ("x", 0)] {
            assert_eq!(count(list), expected, "{list}");
        }
    }

    #[test]
    fn instructions_are_told_from_flags() {
        for (flags, expected) in [
            ("fpu avx2 fma avx512f amx_tile", Vectors::Amx),
            ("fpu avx2 fma avx512f", Vectors::Avx512),
            ("fpu avx2 fma", Vectors::Avx2),
            ("fpu avx", Vectors::Older),
        ] {
            assert_eq!(Vectors::of(flags), expected, "{flags}");
        }
    }

    #[test]
    fn quotas_of_the_groups_around_count() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", "0::/a/b\n");
        write("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 none rw\n");
        write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
        write("sys/devices/system/cpu/online", "0-7\n");
        write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-3\n");
        let cpu = Cpu::gather(&Sources::under(root.path()));
        assert_eq!((cpu.online, cpu.usable, cpu.quota), (8, 4, Some(1.5)));
    }
}
