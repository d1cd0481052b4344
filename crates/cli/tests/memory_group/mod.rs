//! A control group with a limit on memory.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use std::fs;
use std::path::{Path, PathBuf};

/// Exists until this value is dropped, by which time its processes must have ended.
pub(crate) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes a group below the one of all processes, of version 2 or 1 of control groups.
    pub(crate) fn new(bytes: u64) -> Self {
        for (root, limit) in
            [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")]
        {
            let path = Path::new(root).join(format!("brigade-test-{}", std::process::id()));
            if Path::new(root).join("cgroup.procs").exists() && fs::create_dir(&path).is_ok() {
                let group = Self(path);
                // Version 2 has it, where the kernel counts swap.
                let _ = fs::write(group.0.join("memory.swap.max"), "0");
                if fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                    return group;
                }
            }
        }
        panic!("no control group with a limit on memory can be made");
    }

    /// A script of the shell that enters the group and becomes the program in its arguments.
    pub(crate) fn script(&self) -> String {
        format!("echo $$ >{} && exec \"$0\" \"$@\"", self.0.join("cgroup.procs").display())
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}
