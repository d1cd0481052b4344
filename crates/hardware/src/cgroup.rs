//! Folders of the control groups (cgroups) of this process, whose files hold the limits of a container or batch system.

use std::path::{Path, PathBuf};

use crate::Sources;
use crate::mounts;

/// The control groups of this process for one controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// Folders of this process's group and of its parent groups, innermost first.
    pub folders: Vec<PathBuf>,
    /// `true` for the unified hierarchy (cgroup v2), whose files have other names than those of version 1.
    pub unified: bool,
}

/// Returns the control groups that limit this process for a controller (`memory`, `cpu`).
///
/// The list of folders is empty where the controller is not mounted.
#[must_use]
pub fn of(sources: &Sources, controller: &str) -> Groups {
    let text = sources.read("/proc/self/cgroup").unwrap_or_default();
    let mounts = mounts::all(sources);
    let mut unified = None;
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        if controllers.is_empty() {
            unified = Some(path);
        } else if controllers.split(',').any(|it| it == controller) {
            // A controller mounted as version 1 is not in the unified hierarchy.
            let mount = mounts.iter().find(|mount| {
                mount.kind == "cgroup" && mount.options.split(',').any(|it| it == controller)
            });
            let folders = mount.map(|mount| chain(mount, path)).unwrap_or_default();
            return Groups { folders, unified: false };
        }
    }
    let mount = mounts.iter().find(|mount| mount.kind == "cgroup2");
    let folders = match (mount, unified) {
        (Some(mount), Some(path)) => chain(mount, path),
        _ => Vec::new(),
    };
    Groups { folders, unified: true }
}

/// Returns the folders from the group's own up to the mount point. In a container the mount shows only the part of the
/// tree below its root.
fn chain(mount: &mounts::Mount, path: &str) -> Vec<PathBuf> {
    let inside = Path::new(path).strip_prefix(&mount.root).unwrap_or_else(|_| Path::new(""));
    let inside = inside.strip_prefix("/").unwrap_or(inside);
    let mut folders: Vec<PathBuf> =
        inside.ancestors().map(|ancestor| mount.point.join(ancestor)).collect();
    folders.dedup();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(cgroup: &str, mountinfo: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("proc/self");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("cgroup"), cgroup).unwrap();
        std::fs::write(folder.join("mountinfo"), mountinfo).unwrap();
        root
    }

    #[test]
    fn unified() {
        let root =
            host("0::/job.slice/step\n", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        let groups = of(&Sources::under(root.path()), "memory");
        assert!(groups.unified);
        let expected = ["job.slice/step", "job.slice", ""];
        let expected: Vec<PathBuf> =
            expected.iter().map(|it| Path::new("/sys/fs/cgroup").join(it)).collect();
        assert_eq!(groups.folders, expected);
    }

    #[test]
    fn version_1_in_a_container() {
        let root = host(
            "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
            "30 1 0:26 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        );
        let groups = of(&Sources::under(root.path()), "memory");
        assert!(!groups.unified);
        assert_eq!(groups.folders, [Path::new("/sys/fs/cgroup/memory/")]);
        // The controller is not mounted: there are no folders.
        assert_eq!(of(&Sources::under(root.path()), "cpu").folders, Vec::<PathBuf>::new());
    }
}
