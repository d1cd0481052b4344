//! Check of memory: little of it free, a tight limit, or recent kills by the out-of-memory killer.

use brigade_hardware::Memory;

use crate::cluster::Cluster;
use crate::facts::{Facts, Kill};
use crate::finding::{Finding, Subject};
use crate::quantity::{bytes, counted, duration};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut least: Option<u64> = None;
    for (_, host, facts) in cluster.examined() {
        findings.extend(of_host(facts).into_iter().map(|it| it.on(&host.name)));
        least = Some(least.unwrap_or(u64::MAX).min(facts.memory.free_bytes()));
    }
    if let (true, Some(least)) = (findings.is_empty(), least) {
        let each = if cluster.hosts.len() > 1 { " or more on each host" } else { "" };
        findings.push(Finding::ok(Subject::Memory, format!("{} free{each}", bytes(least))));
    }
    findings
}

fn of_host(facts: &Facts) -> Vec<Finding> {
    let memory = &facts.memory;
    let mut findings = Vec::new();
    let free = memory.free_bytes();
    if free < WARN_BYTES {
        let found = format!("only {} of {} are free", bytes(free), bytes(total(memory)));
        let finding = if free < FAIL_BYTES {
            Finding::fail(Subject::Memory, found)
                .means("the kernel would soon kill a rank (signal 9)")
        } else {
            Finding::warning(Subject::Memory, found)
                .means("a rank needs some hundred megabytes before it has a model")
        };
        findings.push(if is_group(memory) {
            finding
                .remedy("raise the limit of the container or of the batch job")
                .command("docker run --memory 32g")
        } else {
            finding.remedy("see which processes use it").command("ps aux --sort=-rss | head")
        });
    } else if let Some(limit) = memory.group_limit_bytes {
        let found = format!(
            "a limit of {} holds, of the host's {}",
            bytes(limit),
            bytes(memory.total_bytes)
        );
        findings.push(
            Finding::note(Subject::Memory, found)
                .means("a rank that goes beyond it is killed (signal 9)"),
        );
    }
    let swapping = memory.swap_used_bytes > memory.swap_bytes / 2
        && memory.swap_used_bytes > WARN_BYTES
        && memory.available_bytes < memory.total_bytes / 10;
    if swapping {
        findings.push(
            Finding::warning(
                Subject::Memory,
                format!("{} are swapped out", bytes(memory.swap_used_bytes)),
            )
            .means("what is swapped in during a step holds up all ranks")
            .remedy("free memory, or switch swapping off")
            .command("sudo swapoff -a"),
        );
    }
    if memory.huge_page_bytes > memory.total_bytes / 2 {
        findings.push(
            Finding::note(
                Subject::Memory,
                format!("{} are set aside as huge pages", bytes(memory.huge_page_bytes)),
            )
            .means("programs that do not ask for those cannot use them"),
        );
    }
    findings.extend([false, true].into_iter().filter_map(|of_group| kills(facts, of_group)));
    findings
}

/// Reports killed processes. On a host with containers they may be another container's, which is not a fault of the
/// host.
fn kills(facts: &Facts, of_group: bool) -> Option<Finding> {
    let kills = facts.kernel_log.kills.iter();
    let recent: Vec<&Kill> =
        kills.filter(|kill| kill.of_group == of_group && kill.seconds_ago < RECENT).collect();
    let last = recent.last()?;
    let found = format!(
        "the kernel has killed {} for {}, the last ({}) {} ago",
        counted(recent.len(), "process", "processes"),
        if of_group { "the memory limit of a control group" } else { "memory" },
        last.program,
        duration(last.seconds_ago as f64)
    );
    Some(if of_group {
        Finding::note(Subject::Memory, found)
    } else {
        Finding::warning(Subject::Memory, found)
            .means("what needed too much then may need it again")
            .remedy("use smaller batches, fewer ranks or fewer loaders on that host")
            .command("sudo dmesg --human | grep -i 'out of memory'")
    })
}

fn is_group(memory: &Memory) -> bool {
    memory.free_bytes() < memory.available_bytes
}

fn total(memory: &Memory) -> u64 {
    memory.group_limit_bytes.filter(|_| is_group(memory)).unwrap_or(memory.total_bytes)
}

const WARN_BYTES: u64 = 1 << 30;
const FAIL_BYTES: u64 = 256 << 20;
/// Age up to which a kill is recent, in seconds: a day.
const RECENT: u64 = 86_400;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::KernelLog;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn spoiled(spoil: impl FnOnce(&mut Facts)) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(2);
        spoil(fixtures::facts(&mut cluster, 1));
        check(&cluster)
    }

    #[test]
    fn too_little_is_free() {
        fixtures::all_is_well(&check(&fixtures::cluster(2)));
        let (verdict, hosts, found) =
            fixtures::only(&spoiled(|it| it.memory.available_bytes = 512 << 20));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
        assert_eq!(found, "only 512 MiB of 64 GiB are free");
        let (verdict, ..) = fixtures::only(&spoiled(|it| it.memory.available_bytes = 1 << 20));
        assert_eq!(verdict, Verdict::Fail);
    }

    #[test]
    fn limits_of_the_group() {
        let (verdict, _, found) = fixtures::only(&spoiled(|facts| {
            facts.memory.group_limit_bytes = Some(8 << 30);
        }));
        assert_eq!(
            (verdict, found.as_str()),
            (Verdict::Note, "a limit of 8.0 GiB holds, of the host's 64 GiB")
        );
        let findings = spoiled(|facts| {
            facts.memory.group_limit_bytes = Some(1 << 30);
            facts.memory.group_used_bytes = Some(900 << 20);
        });
        assert_eq!(fixtures::only(&findings).2, "only 124 MiB of 1.0 GiB are free");
        assert!(findings[0].remedy.contains("container"));
    }

    #[test]
    fn swap_huge_pages_and_kills() {
        let (verdict, _, found) = fixtures::only(&spoiled(|facts| {
            facts.memory.swap_bytes = 8 << 30;
            facts.memory.swap_used_bytes = 7 << 30;
            facts.memory.available_bytes = 2 << 30;
        }));
        assert_eq!((verdict, found.as_str()), (Verdict::Warning, "7.0 GiB are swapped out"));
        let (verdict, ..) = fixtures::only(&spoiled(|it| it.memory.huge_page_bytes = 40 << 30));
        assert_eq!(verdict, Verdict::Note);
        let log = |of_group, seconds_ago| {
            let kill = Kill { program: "train".to_owned(), of_group, seconds_ago };
            KernelLog { readable: true, kills: vec![kill], ..KernelLog::default() }
        };
        let (verdict, _, found) = fixtures::only(&spoiled(|it| it.kernel_log = log(false, 600)));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.contains("1 process for memory, the last (train) 10 minutes"), "{found}");
        assert_eq!(fixtures::only(&spoiled(|it| it.kernel_log = log(true, 600))).0, Verdict::Note);
        fixtures::all_is_well(&spoiled(|it| it.kernel_log = log(false, 100_000)));
    }
}
