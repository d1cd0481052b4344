//! Check of MTUs: sizes that differ between hosts, and packets that never arrive.

use super::{groups, who_has_what};
use crate::cluster::Cluster;
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for route in &cluster.routes {
        let Some(measured) = route.measured.as_ref().filter(|it| it.stalled) else { continue };
        let (from, to) = (&cluster.hosts[route.from].name, &cluster.hosts[route.to].name);
        let finding = match measured.passes {
            Some(bytes) => Finding::fail(
                Subject::Mtu,
                format!("large packets are lost; those of {} bytes arrive", bytes + HEADERS),
            )
            .means("connections open, then hang with the first tensor")
            .remedy(
                "lower the MTU of the interface on both hosts, or let ICMP pass, which reports the right size",
            )
            .command(format!("sudo ip link set {} mtu {}", interface(cluster, route.from), bytes + HEADERS)),
            None => Finding::fail(Subject::Mtu, "connections open, but no bulk data arrives")
                .means("a firewall or a tunnel lets small packets pass and no others")
                .remedy("look at what lies between the hosts")
                .command(format!("tracepath {to}")),
        };
        findings.push(finding.on(from).towards(to));
    }
    let sizes: Vec<(&str, u32)> = cluster
        .examined()
        .filter_map(|(place, host, facts)| {
            let address = cluster.rendezvous_address(place)?;
            Some((host.name.as_str(), facts.network.interface_of(address)?.mtu?))
        })
        .collect();
    if cluster.hosts.len() < 2 || sizes.is_empty() {
        return findings;
    }
    let sizes = groups(sizes);
    if sizes.len() > 1 {
        findings.push(
            Finding::warning(
                Subject::Mtu,
                format!("interfaces have different MTUs: {}", who_has_what(&sizes)),
            )
            .means("in one Ethernet, packets of the larger size do not reach the others")
            .remedy("set the same on all")
            .command(format!("sudo ip link set INTERFACE mtu {}", sizes[0].0)),
        );
    } else if findings.is_empty() {
        findings.push(Finding::ok(Subject::Mtu, format!("{} bytes everywhere", sizes[0].0)));
    }
    findings
}

fn interface(cluster: &Cluster, place: usize) -> String {
    let facts = cluster.hosts[place].facts.as_ref();
    let found = cluster
        .rendezvous_address(place)
        .and_then(|address| Some(facts?.network.interface_of(address)?.name.clone()));
    found.unwrap_or_else(|| "INTERFACE".to_owned())
}

/// Size of the IPv4 and TCP headers in bytes.
const HEADERS: u32 = 40;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn sizes_that_differ() {
        let mut cluster = fixtures::cluster(3);
        fixtures::all_is_well(&check(&cluster));
        fixtures::facts(&mut cluster, 1).network.interfaces[1].mtu = Some(9000);
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.ends_with("1500 on node1, node3; 9000 on node2"), "{found}");
    }

    #[test]
    fn packets_that_never_arrive() {
        for (passes, expected) in [(Some(1200), "1240 bytes arrive"), (None, "no bulk data")] {
            let mut cluster = fixtures::cluster(2);
            let measured = cluster.routes[1].measured.as_mut().unwrap();
            (measured.stalled, measured.passes) = (true, passes);
            let findings = check(&cluster);
            let (verdict, hosts, found) = fixtures::only(&findings);
            assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
            assert_eq!(findings[0].towards.as_deref(), Some("node1"));
            assert!(found.contains(expected), "{found}");
        }
    }
}
