//! Checks that turn facts into findings: pure functions, one file per subject.

use crate::cluster::Cluster;
use crate::finding::{Finding, in_order};

mod brigade;
mod clock;
mod cpu;
mod devices;
mod disk;
mod folder;
mod interfaces;
mod kernel;
mod libtorch;
mod limits;
mod memory;
mod mtu;
mod names;
mod nccl;
mod nics;
mod ports;
mod program;
mod shared_memory;
mod speed;
mod ssh;
mod variables;
mod versions;

pub use versions::other_versions;

/// Checks a cluster and returns the findings, the worst first. Each subject has at least one line.
#[must_use]
pub fn diagnose(cluster: &Cluster) -> Vec<Finding> {
    let findings = CHECKS.iter().flat_map(|check| check(cluster)).collect();
    in_order(findings, cluster.hosts.len())
}

/// Check of one subject. It may return several findings; if all is well, it returns one.
type Check = fn(&Cluster) -> Vec<Finding>;

const CHECKS: &[Check] = &[
    ssh::check,
    brigade::check,
    versions::check,
    clock::check,
    names::check,
    interfaces::check,
    nics::check,
    ports::check,
    mtu::check,
    speed::check,
    folder::check,
    program::check,
    libtorch::check,
    devices::check,
    cpu::check,
    memory::check,
    disk::check,
    shared_memory::check,
    limits::check,
    variables::check,
    kernel::check,
];

/// Groups hosts by a value: larger groups first, otherwise in the order of the hosts.
fn groups<'a, T: PartialEq>(
    values: impl IntoIterator<Item = (&'a str, T)>,
) -> Vec<(T, Vec<&'a str>)> {
    let mut groups: Vec<(T, Vec<&str>)> = Vec::new();
    for (host, value) in values {
        match groups.iter_mut().find(|(have, _)| *have == value) {
            Some((_, hosts)) => hosts.push(host),
            None => groups.push((value, vec![host])),
        }
    }
    groups.sort_by_key(|(_, hosts)| std::cmp::Reverse(hosts.len()));
    groups
}

/// Formats groups of hosts as `a on node1, node2; b on node3`.
fn who_has_what<T: std::fmt::Display>(groups: &[(T, Vec<&str>)]) -> String {
    let parts: Vec<String> =
        groups.iter().map(|(value, hosts)| format!("{value} on {}", some(hosts))).collect();
    parts.join("; ")
}

/// Joins names. For a long list only the first ones.
fn some(hosts: &[&str]) -> String {
    if hosts.len() > 4 {
        format!("{} and {} more", hosts[..3].join(", "), hosts.len() - 3)
    } else {
        hosts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn hosts_in_good_health_are_found_so() {
        for count in [1, 2, 5] {
            let findings = diagnose(&fixtures::cluster(count));
            let bad: Vec<_> = findings.iter().filter(|it| it.verdict > Verdict::Note).collect();
            assert!(bad.is_empty(), "{bad:#?}");
        }
    }

    #[test]
    fn questions_without_answers_and_nothing_breaks() {
        let findings = diagnose(&Cluster::default());
        assert!(findings.iter().all(|it| it.verdict <= Verdict::Note), "{findings:#?}");
        let mut cluster = fixtures::cluster(2);
        for host in &mut cluster.hosts {
            host.facts = None;
        }
        let findings = diagnose(&cluster);
        assert!(findings.iter().all(|it| it.verdict <= Verdict::Note), "{findings:#?}");
    }

    #[test]
    fn many_hosts_are_cut_short() {
        let names = ["a", "b", "c", "d", "e"];
        assert_eq!(some(&names[..4]), "a, b, c, d");
        assert_eq!(some(&names), "a, b, c and 2 more");
        let grouped = groups([("a", 1), ("b", 2), ("c", 2)]);
        assert_eq!(who_has_what(&grouped), "2 on b, c; 1 on a");
    }
}
