//! Memory of the host, and the limit of the control group.

use serde::{Deserialize, Serialize};

use crate::Sources;
use crate::cgroup;

/// Memory of the host in bytes, with the limit of the control group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Total memory of the host.
    pub total_bytes: u64,
    /// Memory that programs can allocate without swapping (`MemAvailable`).
    pub available_bytes: u64,
    /// Size of the swap space.
    pub swap_bytes: u64,
    /// Swap space in use.
    pub swap_used_bytes: u64,
    /// Memory limit of the control group. `None` unless it is below the host's total.
    pub group_limit_bytes: Option<u64>,
    /// Memory that the limited group uses and cannot release at once: its usage without inactive file pages.
    pub group_used_bytes: Option<u64>,
    /// Memory set aside as huge pages, which other programs cannot use.
    pub huge_page_bytes: u64,
}

impl Memory {
    /// Reads the current state from `/proc/meminfo` and the control groups. Values that cannot be read are 0 or `None`.
    #[must_use]
    pub fn gather(sources: &Sources) -> Self {
        let text = sources.read("/proc/meminfo").unwrap_or_default();
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let mut words = line.unwrap_or_default().split_whitespace();
            let number = words.next().and_then(|it| it.parse::<u64>().ok()).unwrap_or_default();
            if words.next() == Some("kB") { number * 1024 } else { number }
        };
        let total_bytes = of("MemTotal");
        let group = tightest_group(sources).filter(|group| group.limit < total_bytes);
        Self {
            total_bytes,
            available_bytes: of("MemAvailable"),
            swap_bytes: of("SwapTotal"),
            swap_used_bytes: of("SwapTotal").saturating_sub(of("SwapFree")),
            group_limit_bytes: group.as_ref().map(|it| it.limit),
            group_used_bytes: group.and_then(|it| it.used),
            huge_page_bytes: of("HugePages_Total") * of("Hugepagesize"),
        }
    }

    /// Returns the memory that a program can allocate now: the minimum of the host's available memory and what is left
    /// of the group's limit.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let of_group = self
            .group_limit_bytes
            .map(|limit| limit.saturating_sub(self.group_used_bytes.unwrap_or_default()));
        self.available_bytes.min(of_group.unwrap_or(u64::MAX))
    }
}

struct Group {
    limit: u64,
    used: Option<u64>,
}

fn tightest_group(sources: &Sources) -> Option<Group> {
    let groups = cgroup::of(sources, "memory");
    let (limit, used, reclaimable) = if groups.unified {
        ("memory.max", "memory.current", "inactive_file ")
    } else {
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
    };
    let limited = groups.folders.iter().filter_map(|folder| {
        let limit: u64 = sources.value(folder.join(limit))?.parse().ok()?;
        let used = sources.value(folder.join(used)).and_then(|it| it.parse::<u64>().ok());
        let stat = sources.read(folder.join("memory.stat")).unwrap_or_default();
        // The kernel reclaims inactive file pages first.
        let reclaimable = stat
            .lines()
            .find_map(|line| line.strip_prefix(reclaimable)?.trim().parse::<u64>().ok())
            .unwrap_or_default();
        Some(Group { limit, used: used.map(|used| used.saturating_sub(reclaimable)) })
    });
    limited.min_by_key(|group| group.limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_limits_what_is_free() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "proc/meminfo",
            "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:  900 kB\nSwapTotal: 100 kB\n\
             SwapFree:  40 kB\nHugePages_Total:       2\nHugepagesize:       4 kB\n",
        );
        write("proc/self/cgroup", "0::/box\n");
        write("proc/self/mountinfo", "30 1 0:26 / /cg rw - cgroup2 none rw\n");
        write("cg/box/memory.max", "204800\n");
        write("cg/box/memory.current", "102400\n");
        write("cg/box/memory.stat", "anon 1\ninactive_file 51200\n");
        let memory = Memory::gather(&Sources::under(root.path()));
        assert_eq!(memory.total_bytes, 1000 * 1024);
        assert_eq!(memory.swap_used_bytes, 60 * 1024);
        assert_eq!(memory.huge_page_bytes, 8 * 1024);
        assert_eq!(memory.group_limit_bytes, Some(204_800));
        assert_eq!(memory.free_bytes(), 204_800 - 51_200);

        // A limit above the host's memory does not count. Version 1 writes one if there is none.
        write("cg/box/memory.max", "9223372036854771712\n");
        let memory = Memory::gather(&Sources::under(root.path()));
        assert_eq!(memory.group_limit_bytes, None);
        assert_eq!(memory.free_bytes(), 900 * 1024);
    }
}
