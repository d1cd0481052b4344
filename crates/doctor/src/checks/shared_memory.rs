//! Check of `/dev/shm`, through which NCCL and data loaders with processes pass data.

use crate::cluster::Cluster;
use crate::facts::{FolderState, FolderUse};
use crate::finding::{Finding, Subject};
use crate::quantity::bytes;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut least: Option<u64> = None;
    for (_, host, facts) in cluster.examined() {
        let Some(folder) = facts.folders.iter().find(|it| it.used_for == FolderUse::SharedMemory)
        else {
            continue;
        };
        let warning = |found: String| Finding::warning(Subject::SharedMemory, found).on(&host.name);
        match &folder.state {
            FolderState::Present(space) if space.total_bytes <= SMALL => findings.push(
                warning(format!("it has only {}", bytes(space.total_bytes)))
                    .means("NCCL between GPUs of one host, or a loader with processes, dies with a bus error")
                    .remedy("give the container more")
                    .command("docker run --shm-size 8g   # or --ipc host"),
            ),
            FolderState::Present(space) if space.free_bytes < SMALL => findings.push(
                warning(format!("only {} of {} are free", bytes(space.free_bytes), bytes(space.total_bytes)))
                    .means("what killed programs leave behind there stays until the host restarts")
                    .remedy("delete what no running program uses")
                    .command("ls -l /dev/shm"),
            ),
            FolderState::Present(space) if !space.writable => findings.push(
                warning("this user may not write there".to_owned())
                    .remedy("mount it with mode 1777")
                    .command("sudo mount -o remount,mode=1777 /dev/shm"),
            ),
            FolderState::Present(space) => {
                least = Some(least.unwrap_or(u64::MAX).min(space.free_bytes));
            }
            _ => findings.push(
                warning("it is not there".to_owned())
                    .means("programs that share memory do not start")
                    .remedy("mount it")
                    .command("sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"),
            ),
        }
    }
    if let (true, Some(least)) = (findings.is_empty(), least) {
        let each = if cluster.hosts.len() > 1 { " or more on each host" } else { "" };
        findings.push(Finding::ok(Subject::SharedMemory, format!("{} free{each}", bytes(least))));
    }
    findings
}

/// Docker's default size for a container.
const SMALL: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Space;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn sizes() {
        fixtures::all_is_well(&check(&fixtures::cluster(2)));
        let there = |total_bytes, free_bytes, writable| {
            FolderState::Present(Space { total_bytes, free_bytes, writable, ..Space::default() })
        };
        for (state, expected) in [
            (there(64 << 20, 64 << 20, true), "only 64 MiB"),
            (there(1 << 30, 1 << 20, true), "only 1.0 MiB of 1.0 GiB"),
            (there(1 << 30, 1 << 30, false), "may not write"),
            (FolderState::Missing, "not there"),
        ] {
            let mut cluster = fixtures::cluster(2);
            fixtures::facts(&mut cluster, 1).folders[2].state = state;
            let (verdict, hosts, found) = fixtures::only(&check(&cluster));
            assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
            assert!(found.contains(expected), "{found}");
        }
    }
}
