//! The environment: leftovers of another job, devices that are not there, settings of one host only.

use brigade_world::env;

use super::{groups, who_has_what};
use crate::cluster::Cluster;
use crate::facts::Facts;
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, host, facts) in cluster.examined() {
        findings.extend(stale(facts).map(|it| it.on(&host.name)));
        findings.extend(visible_devices(facts).map(|it| it.on(&host.name)));
    }
    findings.extend(different(cluster));
    if findings.is_empty() && cluster.examined().next().is_some() {
        findings.push(Finding::ok(Subject::Variables, "none that would mislead a job"));
    }
    findings
}

/// A program that is started by hand would take itself for a rank of that job.
fn stale(facts: &Facts) -> Option<Finding> {
    let set: Vec<&str> = env::TABLE
        .iter()
        .map(|it| it.name)
        .filter(|name| facts.variables.contains_key(*name))
        .collect();
    if set.is_empty() {
        return None;
    }
    Some(
        Finding::warning(Subject::Variables, format!("variables of a job are set: {}", set.join(", ")))
            .means("a program that is started by hand waits for the other ranks of that job; brigade launch sets them anew")
            .remedy("unset them, in ~/.bashrc and /etc/environment too")
            .command(format!("unset {}", set.join(" "))),
    )
}

fn visible_devices(facts: &Facts) -> Option<Finding> {
    let value = facts.variables.get(CUDA_VISIBLE_DEVICES)?;
    let gpus = facts.nvidia.gpus.len();
    if gpus == 0 {
        return None;
    }
    let entries: Vec<&str> = value.split(',').map(str::trim).collect();
    // CUDA stops reading at the first entry that is not a device: what follows is hidden, too.
    let bad = entries.iter().find(|entry| match entry.parse::<i64>() {
        Ok(number) => usize::try_from(number).map_or(true, |number| number >= gpus),
        Err(_) => !(entry.starts_with("GPU-") || entry.starts_with("MIG-")),
    });
    let bad = bad?;
    let set = format!("{CUDA_VISIBLE_DEVICES}={value}");
    if bad.is_empty() || *bad == "-1" {
        return Some(
            Finding::note(Subject::Variables, format!("{set} hides all GPUs"))
                .means("ranks run on the CPU"),
        );
    }
    let good = entries.iter().take_while(|it| *it != bad).count();
    Some(
        Finding::fail(
            Subject::Variables,
            format!("{set}, but GPU {bad} is not there: the host has 0 to {}", gpus - 1),
        )
        .means(format!("CUDA shows {good} of the host's {gpus} GPUs, and no error"))
        .remedy("name devices that are there, or none")
        .command(format!("unset {CUDA_VISIBLE_DEVICES}")),
    )
}

/// Settings of the libraries that some hosts have and others lack, or that differ.
fn different(cluster: &Cluster) -> Vec<Finding> {
    let mut names: Vec<&String> = cluster
        .examined()
        .flat_map(|(_, _, facts)| facts.variables.keys())
        .filter(|name| LIBRARIES.iter().any(|it| name.starts_with(it)))
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

const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
const LIBRARIES: &[&str] = &["GLOO_", "NCCL_", "TORCH_NCCL_", "OMP_"];
/// Interfaces have other names on other hosts.
const OWN_PER_HOST: &[&str] = &["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn with(gpus: u32, variables: &[(&str, &str)]) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(2);
        let facts = fixtures::facts(&mut cluster, 1);
        facts.nvidia = fixtures::nvidia(gpus);
        for (name, value) in variables {
            facts.variables.insert((*name).to_owned(), (*value).to_owned());
        }
        check(&cluster)
    }

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
