//! Check of process limits that training programs reach.

use brigade_rank_env::text::counted;

use crate::cluster::Cluster;
use crate::facts::{Facts, Limit};
use crate::finding::{Finding, Subject};
use crate::quantity::bytes;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut files: Option<u64> = None;
    for (_, host, facts) in cluster.examined() {
        findings.extend(of_host(facts).into_iter().map(|it| it.on(&host.name)));
        let soft = facts.limits.open_files.and_then(|it| it.soft);
        files = soft.map(|soft| files.unwrap_or(u64::MAX).min(soft)).or(files);
    }
    if findings.is_empty() && cluster.examined().next().is_some() {
        let files = files.map_or_else(|| "any number of".to_owned(), |files| files.to_string());
        findings.push(Finding::ok(Subject::Limits, format!("{files} open files")));
    }
    findings
}

fn of_host(facts: &Facts) -> Vec<Finding> {
    let limits = &facts.limits;
    let mut findings = Vec::new();
    let soft = |limit: Option<Limit>| limit.and_then(|it| it.soft);
    if let Some(files) = soft(limits.open_files).filter(|it| *it < FILES) {
        let found = format!("a process may open only {}", counted(files, "file"));
        let finding = if files < FEWEST_FILES {
            Finding::fail(Subject::Limits, found)
        } else {
            Finding::warning(Subject::Limits, found)
        };
        findings.push(
            finding
                .means("each rank needs some for every other rank, and loaders need more")
                .remedy("raise it for this user, in /etc/security/limits.conf too")
                .command(raise("-n", limits.open_files, 65536)),
        );
    }
    let infiniband = &facts.network.infiniband;
    if let Some(locked) = soft(limits.locked_bytes).filter(|_| !infiniband.is_empty()) {
        let found =
            format!("a process may lock only {} of memory, and there is InfiniBand", bytes(locked));
        let finding = if locked < LOCKED {
            Finding::fail(Subject::Limits, found).means("NCCL cannot register its buffers")
        } else {
            Finding::warning(Subject::Limits, found).means("NCCL may fail with large buffers")
        };
        findings.push(
            finding
                .remedy("lift it: \"* - memlock unlimited\" in /etc/security/limits.conf, LimitMEMLOCK=infinity for services")
                .command("ulimit -l unlimited"),
        );
    }
    if let Some(processes) = soft(limits.processes).filter(|it| *it < PROCESSES) {
        findings.push(
            Finding::warning(
                Subject::Limits,
                format!("this user may have only {processes} processes and threads"),
            )
            .means("each rank has a thread per core, and more")
            .remedy("raise it for this user, in /etc/security/limits.conf too")
            .command(raise("-u", limits.processes, 4096)),
        );
    }
    findings
}

/// Returns the command that raises a limit, no further than this user may.
fn raise(flag: &str, limit: Option<Limit>, wanted: u64) -> String {
    let hard = limit.and_then(|it| it.hard);
    format!("ulimit {flag} {}", hard.map_or(wanted, |hard| hard.min(wanted)))
}

const FILES: u64 = 1024;
const FEWEST_FILES: u64 = 64;
const LOCKED: u64 = 64 << 20;
const PROCESSES: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn limits() {
        fixtures::all_is_well(&check(&fixtures::cluster(2)));
        let limit = |soft, hard| Some(Limit { soft: Some(soft), hard: Some(hard) });
        for (spoil, verdict, expected, command) in [
            (
                Box::new(|it: &mut Facts| it.limits.open_files = limit(256, 4096))
                    as Box<dyn Fn(&mut Facts)>,
                Verdict::Warning,
                "only 256 files",
                "ulimit -n 4096",
            ),
            (
                Box::new(|it| it.limits.open_files = limit(20, 1 << 20)),
                Verdict::Fail,
                "only 20 files",
                "ulimit -n 65536",
            ),
            (
                Box::new(|it| it.limits.processes = limit(100, 100)),
                Verdict::Warning,
                "only 100 processes",
                "ulimit -u 100",
            ),
            (
                Box::new(|facts| {
                    facts.limits.locked_bytes = limit(8 << 20, 8 << 20);
                    facts.network.infiniband = vec!["mlx5_0/1".to_owned()];
                }),
                Verdict::Fail,
                "only 8.0 MiB of memory",
                "ulimit -l unlimited",
            ),
        ] {
            let mut cluster = fixtures::cluster(2);
            spoil(fixtures::facts(&mut cluster, 1));
            let findings = check(&cluster);
            let (found_verdict, hosts, found) = fixtures::only(&findings);
            assert_eq!((found_verdict, hosts.as_str()), (verdict, "node2"));
            assert!(found.contains(expected), "{found}");
            assert_eq!(findings[0].command, command);
        }
    }

    #[test]
    fn locked_memory_matters_to_infiniband_alone() {
        let mut cluster = fixtures::cluster(1);
        fixtures::facts(&mut cluster, 0).limits.locked_bytes =
            Some(Limit { soft: Some(0), hard: None });
        fixtures::all_is_well(&check(&cluster));
    }
}
