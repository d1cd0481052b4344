//! Check of disks: full, out of inodes, read-only, or not writable for this user.

use crate::cluster::Cluster;
use crate::facts::{Folder, FolderState, FolderUse, Space};
use crate::finding::{Finding, Subject};
use crate::quantity::bytes;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut least: Option<(u64, String)> = None;
    for (_, host, facts) in cluster.examined() {
        for folder in facts.folders.iter().filter(|it| it.used_for != FolderUse::SharedMemory) {
            findings.extend(of_folder(folder).map(|it| it.on(&host.name)));
            if let FolderState::Present(space) = &folder.state
                && least.as_ref().is_none_or(|(least, _)| space.free_bytes < *least)
            {
                least = Some((space.free_bytes, folder.path.display().to_string()));
            }
        }
    }
    if let (true, Some((free, path))) = (findings.is_empty(), least) {
        let least = if cluster.hosts.len() > 1 { " on the fullest host" } else { "" };
        findings.push(Finding::ok(Subject::Disk, format!("{} free in {path}{least}", bytes(free))));
    }
    findings
}

fn of_folder(folder: &Folder) -> Option<Finding> {
    let path = folder.path.display();
    let used = match folder.used_for {
        FolderUse::Working => "the working folder",
        FolderUse::Temporary => "the folder for temporary files",
        FolderUse::Logs => "the folder for logs",
        FolderUse::SharedMemory => "shared memory",
    };
    let space = match &folder.state {
        FolderState::Present(space) => space,
        // The check of the working folder reports that case.
        _ if folder.used_for == FolderUse::Working => return None,
        FolderState::Missing => {
            return Some(
                Finding::fail(Subject::Disk, format!("{path}, {used}, does not exist"))
                    .remedy("make it")
                    .command(format!("sudo mkdir -m 1777 -p {path}")),
            );
        }
        FolderState::NotAFolder => {
            return Some(
                Finding::fail(Subject::Disk, format!("{path}, {used}, is a file"))
                    .remedy("move the file away, or choose another folder"),
            );
        }
        FolderState::Silent => {
            return Some(
                Finding::fail(Subject::Disk, format!("{path}, {used}, does not answer"))
                    .means("every program that touches it hangs")
                    .remedy("see whether its file server is up"),
            );
        }
        FolderState::Refused(words) => {
            return Some(
                Finding::fail(Subject::Disk, format!("{path}, {used}, cannot be read: {words}"))
                    .remedy("give this user access to it"),
            );
        }
    };
    let place = space.looked_at.display();
    if space.free_bytes < WARN_BYTES {
        return Some(full(
            folder,
            space,
            format!(
                "only {} of {} are free in {place}, {used}",
                bytes(space.free_bytes),
                bytes(space.total_bytes)
            ),
            space.free_bytes < FAIL_BYTES,
        ));
    }
    if space.inodes > 0 && space.free_inodes < WARN_INODES {
        return Some(full(
            folder,
            space,
            format!(
                "{place}, {used}, can hold only {} more files (inodes), though it has room",
                space.free_inodes
            ),
            space.free_inodes < FAIL_INODES,
        ));
    }
    if space.read_only {
        return Some(unwritable(folder, format!("{place}, {used}, is mounted for reading only"))
            .remedy("mount it for writing, or write elsewhere; a disk with errors is mounted so, too")
            .command(format!("sudo mount -o remount,rw {place}")));
    }
    if !space.writable {
        return Some(
            unwritable(folder, format!("{place}, {used}, is not writable for this user"))
                .remedy("give this user the right, or write elsewhere")
                .command(format!("ls -ld {place}")),
        );
    }
    None
}

fn full(folder: &Folder, space: &Space, found: String, fails: bool) -> Finding {
    let finding = if fails {
        Finding::fail(Subject::Disk, found)
            .means("checkpoints, logs or temporary files cannot be written")
    } else {
        Finding::warning(Subject::Disk, found).means("a checkpoint may not fit")
    };
    let place = match folder.used_for {
        FolderUse::Temporary => "delete files that are not needed, or set TMPDIR to a larger disk",
        _ => "delete files that are not needed, or use a larger disk",
    };
    finding
        .remedy(place)
        .command(format!("du -xh --max-depth 2 {} | sort -h | tail", space.looked_at.display()))
}

/// Reports a folder that cannot be written to. Not a failure: a program may write nothing to its working folder.
fn unwritable(folder: &Folder, found: String) -> Finding {
    match folder.used_for {
        FolderUse::Working => {
            Finding::warning(Subject::Disk, found).means("checkpoints could not be written there")
        }
        _ => Finding::fail(Subject::Disk, found).means("the job could not write there"),
    }
}

const WARN_BYTES: u64 = 1 << 30;
const FAIL_BYTES: u64 = 64 << 20;
const WARN_INODES: u64 = 10_000;
const FAIL_INODES: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn spoiled(place: usize, spoil: impl FnOnce(&mut Space)) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(2);
        let folder = &mut fixtures::facts(&mut cluster, 1).folders[place];
        let FolderState::Present(space) = &mut folder.state else { panic!() };
        spoil(space);
        check(&cluster)
    }

    #[test]
    fn disks() {
        fixtures::all_is_well(&check(&fixtures::cluster(2)));
        for (spoil, verdict, expected) in [
            (
                (|it| it.free_bytes = 512 << 20) as fn(&mut Space),
                Verdict::Warning,
                "only 512 MiB of 1.0 TiB",
            ),
            (|it| it.free_bytes = 0, Verdict::Fail, "only 0 bytes"),
            (|it| it.free_inodes = 7, Verdict::Fail, "only 7 more files"),
            (|it| it.free_inodes = 700, Verdict::Warning, "only 700 more files"),
            (|it| it.read_only = true, Verdict::Fail, "reading only"),
            (|it| it.writable = false, Verdict::Fail, "not writable"),
        ] {
            let (found_verdict, hosts, found) = fixtures::only(&spoiled(1, spoil));
            assert_eq!((found_verdict, hosts.as_str()), (verdict, "node2"));
            assert!(found.contains(expected) && found.contains("/tmp"), "{found}");
        }
    }

    #[test]
    fn a_job_may_start_where_it_cannot_write() {
        assert_eq!(fixtures::only(&spoiled(0, |it| it.read_only = true)).0, Verdict::Warning);
    }

    #[test]
    fn file_systems_that_do_not_count_files() {
        fixtures::all_is_well(&spoiled(1, |it| (it.inodes, it.free_inodes) = (0, 0)));
    }

    #[test]
    fn temporary_files_have_no_place() {
        for state in [FolderState::Missing, FolderState::NotAFolder, FolderState::Silent] {
            let mut cluster = fixtures::cluster(1);
            fixtures::facts(&mut cluster, 0).folders[1].state = state;
            assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Fail);
        }
    }
}
