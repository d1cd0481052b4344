//! Check of environment variables: leftovers of another job, devices that do not exist, settings of one host only.

use brigade_hardware::Vendor;
use brigade_rank_env::env;

use super::{groups, nccl, who_has_what};
use crate::cluster::Cluster;
use crate::facts::Facts;
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, host, facts) in cluster.examined() {
        findings.extend(stale(facts).map(|it| it.on(&host.name)));
        findings.extend(visible_devices(facts).into_iter().map(|it| it.on(&host.name)));
        findings.extend(nccl::check(facts).into_iter().map(|it| it.on(&host.name)));
    }
    findings.extend(different(cluster));
    if findings.is_empty() && cluster.examined().next().is_some() {
        findings.push(Finding::ok(Subject::Variables, "none that would mislead a job"));
    }
    findings
}

/// Reports variables of a rank: a program that is started by hand would act as a rank of that job.
fn stale(facts: &Facts) -> Option<Finding> {
    let set: Vec<&str> = env::TABLE
        .iter()
        .map(|library| library.name)
        .filter(|name| facts.variables.contains_key(*name))
        .collect();
    if set.is_empty() {
        return None;
    }
    Some(
        Finding::warning(
            Subject::Variables,
            format!("variables of a job are set: {}", set.join(", ")),
        )
        .means(
            "a program that is started by hand waits for the other ranks of that job; brigade \
            launch sets them itself",
        )
        .remedy("unset them, in ~/.bashrc and /etc/environment too")
        .command(format!("unset {}", set.join(" "))),
    )
}

fn visible_devices(facts: &Facts) -> Vec<Finding> {
    let gpus = facts.devices.usable();
    if gpus == 0 {
        return Vec::new();
    }
    let kind = facts.devices.kind();
    let names = kind.visibility().iter().flat_map(|layer| layer.iter());
    let set = names.filter_map(|name| Some((*name, facts.variables.get(*name)?)));
    set.filter_map(|(name, value)| visible(kind, name, value, gpus)).collect()
}

fn visible(kind: &'static dyn Vendor, name: &str, value: &str, gpus: usize) -> Option<Finding> {
    let word = kind.device_word();
    let entries: Vec<&str> = value.split(',').map(str::trim).collect();
    let set = format!("{name}={value}");
    let twice = entries.iter().enumerate().find(|(at, it)| entries[..*at].contains(it));
    if let Some((_, twice)) = twice.filter(|(_, it)| !it.is_empty()) {
        return Some(
            Finding::fail(Subject::Variables, format!("{set} names {word} {twice} twice"))
                .means(format!("programs see no {word} twice: they find fewer, or none"))
                .remedy("name each device once")
                .command(format!("unset {name}")),
        );
    }
    // Programs stop reading at the first entry that is not a device, so the entries after it are hidden, too.
    let bad = entries.iter().find(|entry| match entry.parse::<i64>() {
        Ok(number) => usize::try_from(number).map_or(true, |number| number >= gpus),
        Err(_) => !kind.id_prefixes().iter().any(|it| entry.starts_with(it)),
    });
    let bad = bad?;
    if bad.is_empty() || *bad == "-1" {
        return Some(
            Finding::note(Subject::Variables, format!("{set} hides all {word}s"))
                .means("ranks run on the CPU"),
        );
    }
    let good = entries.iter().take_while(|it| *it != bad).count();
    Some(
        Finding::fail(
            Subject::Variables,
            format!("{set}, but {word} {bad} is not there: the host has 0 to {}", gpus - 1),
        )
        .means(format!("programs see {good} of the host's {gpus} {word}s, and no error"))
        .remedy("name devices that are there, or none")
        .command(format!("unset {name}")),
    )
}

/// Reports settings of libraries that only some hosts have, or that differ.
fn different(cluster: &Cluster) -> Vec<Finding> {
    let mut names: Vec<&String> = cluster
        .examined()
        .flat_map(|(_, _, facts)| facts.variables.keys())
        .filter(|name| LIBRARIES.iter().any(|prefix| name.starts_with(prefix)))
        .filter(|name| !OWN_PER_HOST.contains(&name.as_str()))
        .collect();
    names.sort();
    names.dedup();
    let mut findings = Vec::new();
    for name in names {
        let values = groups(cluster.examined().map(|(_, host, facts)| {
            let value = facts.variables.get(name).map_or("unset", String::as_str);
            (host.name.as_str(), value)
        }));
        if values.len() > 1 {
            findings.push(
                Finding::note(
                    Subject::Variables,
                    format!("{name} differs: {}", who_has_what(&values)),
                )
                .means("ranks of one job should have the same settings"),
            );
        }
    }
    findings
}

const LIBRARIES: &[&str] = &[
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "GLOO_",
    "NCCL_",
    "TORCH_FR_",
    "TORCH_NCCL_",
    "OMP_",
];
/// Variables that may differ: interfaces have other names on other hosts.
const OWN_PER_HOST: &[&str] = &["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn with(gpus: u32, variables: &[(&str, &str)]) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(2);
        let facts = fixtures::facts(&mut cluster, 1);
        facts.devices = fixtures::devices(gpus);
        for (name, value) in variables {
            facts.variables.insert((*name).to_owned(), (*value).to_owned());
        }
        check(&cluster)
    }

    const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

    #[test]
    fn leftovers_of_a_job() {
        fixtures::all_is_well(&with(0, &[]));
        let findings = with(0, &[("WORLD_SIZE", "8"), ("RANK", "3")]);
        let (verdict, hosts, found) = fixtures::only(&findings);
        assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
        assert_eq!(found, "variables of a job are set: RANK, WORLD_SIZE");
        assert_eq!(findings[0].command, "unset RANK WORLD_SIZE");
    }

    #[test]
    fn devices_that_are_not_there() {
        for (value, verdict) in [
            ("0,7", Some(Verdict::Fail)),
            ("2", Some(Verdict::Fail)),
            ("x", Some(Verdict::Fail)),
            ("1,1", Some(Verdict::Fail)),
            ("", Some(Verdict::Note)),
            ("-1", Some(Verdict::Note)),
            ("1,0", None),
            ("GPU-8932f937", None),
        ] {
            let findings = with(2, &[(CUDA_VISIBLE_DEVICES, value)]);
            let found = findings.iter().find(|it| it.verdict != Verdict::Ok).map(|it| it.verdict);
            assert_eq!(found, verdict, "{value:?}: {findings:?}");
        }
        fixtures::all_is_well(&with(0, &[(CUDA_VISIBLE_DEVICES, "7")]));
    }

    #[test]
    fn settings_of_one_host() {
        let (verdict, _, found) = fixtures::only(&with(0, &[("NCCL_PROTO", "Simple")]));
        assert_eq!(verdict, Verdict::Note);
        assert_eq!(found, "NCCL_PROTO differs: unset on node1; Simple on node2");
        fixtures::all_is_well(&with(0, &[("GLOO_SOCKET_IFNAME", "eth0"), ("MKL_DEBUG", "1")]));
    }
}
