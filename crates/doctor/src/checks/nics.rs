//! Check of network cards and GPUs: the nearest card of each GPU, and whether NCCL's variables exclude it.
//!
//! Nothing is set: NCCL looks for the nearest cards by itself, unless the user's variables choose others.

use brigade_hardware::{Distance, NearNic, nearest};

use super::{groups, who_has_what};
use crate::cluster::Cluster;
use crate::facts::{Facts, Gpu};
use crate::finding::{Finding, Subject};
use crate::interface_choice::{NCCL_SOCKET_IFNAME, matches};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut pairs = Vec::new();
    for (_, host, facts) in cluster.examined() {
        let seen: Vec<&Gpu> = facts.devices.gpus.iter().filter(|it| !it.nics.is_empty()).collect();
        if seen.is_empty() {
            continue;
        }
        pairs.push((host.name.as_str(), pairing(facts.devices.kind().device_word(), &seen)));
        if cluster.hosts.len() < 2 {
            continue;
        }
        let several = [(NCCL_IB_HCA, true), (NCCL_SOCKET_IFNAME, false)];
        let told = several.iter().filter_map(|(name, rdma)| chosen(facts, &seen, name, *rdma));
        findings.extend(told.map(|finding| finding.on(&host.name)));
    }
    // Missing interfaces are reported by the check of interfaces, missing adapters by this one.
    for (_, host, facts) in cluster.examined().filter(|_| cluster.hosts.len() > 1) {
        findings.extend(absent(facts).map(|finding| finding.on(&host.name)));
    }
    if findings.is_empty() && !pairs.is_empty() {
        let groups = groups(pairs);
        let found = match &groups[..] {
            [(same, _)] => same.clone(),
            _ => who_has_what(&groups),
        };
        findings.push(Finding::ok(Subject::Nics, found));
    }
    findings
}

/// `GPU 0: mlx5_0 (same PCI switch), GPU 1: ...`
fn pairing(word: &str, gpus: &[&Gpu]) -> String {
    let of = |gpu: &&Gpu| {
        let near = nearest(&gpu.nics);
        let names: Vec<&str> = near.iter().map(|nic| nic.name()).collect();
        match near.first() {
            Some(nic) => {
                format!(
                    "{word} {}: {} ({})",
                    gpu.device.id,
                    names.join(" and "),
                    nic.distance.words()
                )
            }
            None => format!("{word} {}: none is up", gpu.device.id),
        }
    };
    let usable = gpus.iter().filter(|gpu| gpu.device.is_usable);
    usable.map(of).collect::<Vec<_>>().join(", ")
}

/// Reports a variable that leaves NCCL only cards that are far from every GPU, although nearer ones exist.
fn chosen(facts: &Facts, gpus: &[&Gpu], variable: &str, rdma: bool) -> Option<Finding> {
    let value = facts.variables.get(variable).filter(|it| !it.is_empty())?;
    let is_meant = |nic: &NearNic| {
        if rdma {
            nic.rdma.as_deref().is_some_and(|name| matches(value, name))
        } else {
            nic.interfaces.iter().any(|name| matches(value, name))
        }
    };
    // Sockets carry the data only without an adapter that NCCL can use.
    let carries = rdma || facts.network.infiniband.is_empty();
    let best = |wanted: &dyn Fn(&NearNic) -> bool| -> Option<Distance> {
        let nics = gpus.iter().flat_map(|gpu| &gpu.nics);
        nics.filter(|nic| nic.is_up && (!rdma || nic.rdma.is_some()) && wanted(nic))
            .map(|nic| nic.distance)
            .min()
    };
    let (told, there) = (best(&is_meant)?, best(&|_| true)?);
    if !carries || told <= there || told < Distance::Node {
        return None;
    }
    let near = gpus.iter().flat_map(|gpu| nearest(&gpu.nics)).map(NearNic::name);
    let mut near: Vec<&str> = near.collect();
    near.sort_unstable();
    near.dedup();
    Some(
        Finding::warning(
            Subject::Nics,
            format!(
                "{variable}={value} leaves NCCL cards that are far from every GPU ({})",
                told.words()
            ),
        )
        .means("data between hosts goes the long way through the processors")
        .remedy(format!("leave the choice to NCCL; near the GPUs are {}", near.join(", ")))
        .command(format!("unset {variable}")),
    )
}

/// Reports adapters in `NCCL_IB_HCA` that do not exist.
fn absent(facts: &Facts) -> Option<Finding> {
    let value = facts.variables.get(NCCL_IB_HCA).filter(|it| !it.is_empty())?;
    if !facts.devices.use_nccl() || value.starts_with('^') {
        return None;
    }
    // An active port is `mlx5_0/1`.
    let adapters = facts.network.infiniband.iter().map(|it| it.split('/').next().unwrap_or(it));
    let mut adapters: Vec<&str> = adapters.collect();
    adapters.dedup();
    if adapters.iter().any(|name| matches(value, name)) {
        return None;
    }
    let there = if adapters.is_empty() {
        "no adapter is active".to_owned()
    } else {
        format!("active are {}", adapters.join(", "))
    };
    Some(
        Finding::warning(
            Subject::Nics,
            format!("{NCCL_IB_HCA}={value} names no adapter that is active"),
        )
        .means("NCCL goes over TCP, which is slower, and reports it only with NCCL_DEBUG=INFO")
        .remedy(format!("leave the choice to NCCL, or name one that is there: {there}"))
        .command(format!("unset {NCCL_IB_HCA}")),
    )
}

const NCCL_IB_HCA: &str = "NCCL_IB_HCA";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    /// Returns two hosts with two GPUs, an adapter beside each GPU and a card of the board.
    fn cluster() -> Cluster {
        let mut cluster = fixtures::cluster(2);
        for place in 0..2 {
            let facts = fixtures::facts(&mut cluster, place);
            facts.devices = fixtures::devices(2);
            facts.network.infiniband = vec!["mlx5_0/1".to_owned(), "mlx5_1/1".to_owned()];
            for (number, gpu) in facts.devices.gpus.iter_mut().enumerate() {
                let nic = |rdma: Option<&str>, name: &str, distance| NearNic {
                    rdma: rdma.map(str::to_owned),
                    interfaces: vec![name.to_owned()],
                    is_up: true,
                    distance,
                };
                let (near, far) =
                    if number == 0 { ("mlx5_0", "mlx5_1") } else { ("mlx5_1", "mlx5_0") };
                gpu.nics = vec![
                    nic(Some(near), "ibx", Distance::Switch),
                    nic(Some("mlx5_9"), "iby", Distance::System),
                    nic(Some(far), "ibz", Distance::System),
                    nic(None, "eth0", Distance::Root),
                ];
            }
        }
        cluster
    }

    fn with(name: &str, value: &str) -> Vec<Finding> {
        let mut cluster = cluster();
        fixtures::facts(&mut cluster, 1).variables.insert(name.to_owned(), value.to_owned());
        check(&cluster)
    }

    #[test]
    fn each_gpu_and_its_card() {
        let findings = check(&cluster());
        fixtures::all_is_well(&findings);
        let expected = "GPU 0: mlx5_0 (same PCI switch), GPU 1: mlx5_1 (same PCI switch)";
        assert_eq!(findings[0].found, expected);
        assert_eq!(check(&fixtures::cluster(2)), []);
    }

    #[test]
    fn cards_that_are_not_there_or_far() {
        for value in ["mlx5", "=mlx5_0,mlx5_1:1", "^mlx5_9", "mlx5_1"] {
            fixtures::all_is_well(&with(NCCL_IB_HCA, value));
        }
        let (verdict, hosts, found) = fixtures::only(&with(NCCL_IB_HCA, "mlx4_0"));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
        assert!(found.contains("names no adapter that is active"), "{found}");
        let mut cluster = cluster();
        let facts = fixtures::facts(&mut cluster, 0);
        facts.network.infiniband.push("mlx5_9/1".to_owned());
        facts.variables.insert(NCCL_IB_HCA.to_owned(), "=mlx5_9".to_owned());
        let findings = check(&cluster);
        let (_, _, found) = fixtures::only(&findings);
        assert!(found.contains("far from every GPU (another NUMA node)"), "{found}");
        assert!(findings[0].remedy.ends_with("near the GPUs are mlx5_0, mlx5_1"), "{findings:?}");
        // The interface for setting up does not carry the data here.
        fixtures::all_is_well(&with(NCCL_SOCKET_IFNAME, "eth0"));
    }
}
