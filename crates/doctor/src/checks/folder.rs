//! Check of the working folder: it exists on every host, and is shared or not.

use super::some;
use crate::cluster::Cluster;
use crate::facts::{FolderState, FolderUse};
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, host, facts) in cluster.examined() {
        let Some(folder) = facts.folders.iter().find(|it| it.used_for == FolderUse::Working) else {
            continue;
        };
        let path = folder.path.display();
        let fail = |found: String| Finding::fail(Subject::Folder, found).on(&host.name);
        findings.push(match &folder.state {
            FolderState::Present(_) => continue,
            FolderState::Missing => fail(format!("the working folder {path} does not exist"))
                .means("ranks could not start there")
                .remedy("make it, mount it, or start the job from a folder that all hosts have")
                .command(format!("ssh {} mkdir -p {path}", host.name)),
            FolderState::NotAFolder => fail(format!("{path} is a file there, not a folder"))
                .remedy("start the job from a folder that all hosts have"),
            FolderState::Silent => fail(format!("the file system of {path} does not answer"))
                .means("every program that touches it hangs")
                .remedy("see whether its server is up")
                .command(format!("mount | grep {}", first_parts(&folder.path.to_string_lossy()))),
            FolderState::Refused(words) => fail(format!("{path} cannot be read: {words}"))
                .remedy("give this user access to it"),
        });
    }
    if !findings.is_empty() {
        return findings;
    }
    let mut seen = Vec::new();
    let mut unseen = Vec::new();
    for host in cluster.hosts.iter().skip(1) {
        match host.sees_our_file {
            Some(true) => seen.push(host.name.as_str()),
            Some(false) => unseen.push(host.name.as_str()),
            None => {}
        }
    }
    let Some((first, path)) = cluster.examined().find_map(|(_, host, facts)| {
        Some((host.name.as_str(), facts.working_folder()?.display().to_string()))
    }) else {
        return Vec::new();
    };
    vec![match (&seen[..], &unseen[..]) {
        ([], []) => Finding::ok(Subject::Folder, path),
        (_, []) => Finding::ok(Subject::Folder, format!("{path} is the same on all hosts")),
        ([], _) => Finding::note(Subject::Folder, format!("{path} is another folder on each host"))
            .means("each host needs its own copy of program and data; checkpoints stay where they are written"),
        (_, unseen) => Finding::note(
            Subject::Folder,
            format!("{path} is shared by some hosts, but {} {} another folder than {first}", some(unseen), if unseen.len() == 1 { "has" } else { "have" }),
        )
        .means("program, data and checkpoints differ from host to host"),
    }]
}

/// Returns the upper folders of a path, one of which is probably the mount point.
fn first_parts(path: &str) -> String {
    path.split('/').take(3).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn folders_that_cannot_be_used() {
        for (state, expected) in [
            (FolderState::Missing, "does not exist"),
            (FolderState::NotAFolder, "a file"),
            (FolderState::Silent, "does not answer"),
            (FolderState::Refused("Permission denied".to_owned()), "Permission denied"),
        ] {
            let mut cluster = fixtures::cluster(2);
            fixtures::facts(&mut cluster, 1).folders[0].state = state;
            let (verdict, hosts, found) = fixtures::only(&check(&cluster));
            assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
            assert!(found.contains("/srv") && found.contains(expected), "{found}");
        }
    }

    #[test]
    fn shared_or_not() {
        let mut cluster = fixtures::cluster(3);
        assert_eq!(fixtures::only(&check(&cluster)).2, "/srv is another folder on each host");
        cluster.hosts[1].sees_our_file = Some(true);
        assert!(fixtures::only(&check(&cluster)).2.contains("node3 has another folder than node1"));
        cluster.hosts[2].sees_our_file = Some(true);
        fixtures::all_is_well(&check(&cluster));
        let alone = check(&fixtures::cluster(1));
        assert_eq!((alone[0].verdict, alone[0].found.as_str()), (Verdict::Ok, "/srv"));
    }
}
