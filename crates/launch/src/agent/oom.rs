//! Detection of kills by the kernel's out-of-memory killer in this process's control group.

use std::fs;
use std::path::PathBuf;

/// State of the kernel's out-of-memory killer: its kills before the ranks started.
#[derive(Clone, Debug, Default)]
pub(super) struct OomKiller {
    counter: Option<(PathBuf, u64)>,
}

impl OomKiller {
    /// Reads the counter, if the system has one that this process may read.
    pub(super) fn look() -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let counter = counters(&groups).into_iter().find_map(|path| Some((read(&path)?, path)));
        Self { counter: counter.map(|(kills, path)| (path, kills)) }
    }

    /// Returns a hint for the user about a rank that was killed for lack of memory.
    pub(super) fn hint(&self) -> Option<String> {
        let (path, before) = self.counter.as_ref()?;
        let kills = read(path)?.checked_sub(*before).filter(|kills| *kills > 0)?;
        let processes =
            if kills == 1 { "a process".to_owned() } else { format!("{kills} processes") };
        Some(format!(
            "memory ran out: the kernel has killed {processes} of this control group since the \
             ranks started ({})",
            path.display(),
        ))
    }
}

/// Files that may hold the counter: of version 2, if there is one hierarchy, then of version 1.
fn counters(groups: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        // In a container, the group's path may be that of the host, although the files are at the top.
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.events"),
            list if list.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.oom_control")
            }
            _ => continue,
        };
        paths.push(PathBuf::from(format!("{root}{}/{file}", group.trim_end_matches('/'))));
        paths.push(PathBuf::from(format!("{root}/{file}")));
    }
    paths
}

fn read(path: &PathBuf) -> Option<u64> {
    count(&fs::read_to_string(path).ok()?)
}

fn count(events: &str) -> Option<u64> {
    events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions() {
        let paths = |groups| -> Vec<String> {
            counters(groups).iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(
            paths("0::/user.slice/a\n"),
            ["/sys/fs/cgroup/user.slice/a/memory.events", "/sys/fs/cgroup/memory.events"]
        );
        let first = "5:cpu,cpuacct:/x\n4:memory:/docker/1\n";
        assert_eq!(
            paths(first),
            [
                "/sys/fs/cgroup/memory/docker/1/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control"
            ]
        );
        assert_eq!(paths("nonsense\n0::/\n")[0], "/sys/fs/cgroup/memory.events");

        assert_eq!(count("low 0\noom 3\noom_kill 2\noom_group_kill 0\n"), Some(2));
        assert_eq!(count("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"), Some(7));
        assert_eq!(count("oom_kill\n"), None);
    }

    #[test]
    fn only_news_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory.events");
        let killer = OomKiller { counter: Some((path.clone(), 2)) };
        for (content, expected) in [
            ("oom_kill 2\n", None),
            ("oom_kill 1\n", None),
            ("oom_kill 3\n", Some("has killed a process of")),
            ("oom_kill 5\n", Some("has killed 3 processes of")),
        ] {
            fs::write(&path, content).unwrap();
            let hint = killer.hint();
            match expected {
                Some(text) => {
                    assert!(hint.as_ref().is_some_and(|hint| hint.contains(text)), "{hint:?}");
                }
                None => assert_eq!(hint, None),
            }
        }
        assert_eq!(OomKiller::default().hint(), None);
    }
}
