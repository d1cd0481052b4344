//! Check of name resolution: each host's own name, and those of the others.

use std::net::IpAddr;

use crate::cluster::{Cluster, HostReport};
use crate::facts::{Facts, Resolution};
use crate::finding::{Finding, Subject};
use crate::interface_choice::GLOO_SOCKET_IFNAME;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (place, host, facts) in cluster.examined() {
        findings.extend(own_name(cluster, place, host, facts));
    }
    for (place, host, facts) in cluster.examined() {
        let others = cluster.hosts.iter().enumerate().filter(|(other, _)| *other != place);
        // One line is enough for a host that cannot be reached from here either.
        for (other, peer) in others.filter(|(_, peer)| peer.lost.is_none()) {
            let known = facts.names.iter().find(|it| it.name == peer.name);
            findings.extend(known.and_then(|it| name_of_peer(cluster, host, other, peer, it)));
        }
    }
    if findings.is_empty() && cluster.examined().next().is_some() {
        let alone = cluster.hosts.len() == 1;
        let found = if alone {
            "the host can resolve its own name"
        } else {
            "every host's name leads to it from all hosts"
        };
        findings.push(Finding::ok(Subject::Names, found));
    }
    findings
}

/// Checks a host's own name: Gloo announces the first of its addresses that the host has.
fn own_name(cluster: &Cluster, place: usize, host: &HostReport, facts: &Facts) -> Option<Finding> {
    let own = facts.names.iter().find(|it| it.name == facts.host.name)?;
    let several = cluster.hosts.len() > 1;
    let usable = |it: &&IpAddr| it.is_loopback() || facts.network.interface_of(**it).is_some();
    let found = match own.addresses.iter().find(usable) {
        Some(address) if address.is_loopback() => {
            format!("its own name {} is {address}{}", own.name, where_from(own))
        }
        Some(_) if own.addresses.iter().all(IpAddr::is_ipv6) => {
            let known = own.addresses.first()?;
            return several.then(|| {
                Finding::warning(
                    Subject::Names,
                    format!("its own name {} has only an IPv6 address, {known}", own.name),
                )
                .means("all ranks must then use IPv6, and MASTER_ADDR needs brackets in URLs")
                .remedy("give the name an IPv4 address, too, in /etc/hosts")
                .on(&host.name)
            });
        }
        Some(_) => return None,
        None => match (own.addresses.first(), &own.error) {
            (Some(address), _) => format!(
                "its own name {} is {address}{}, which no interface of it has",
                own.name,
                where_from(own)
            ),
            (None, Some(error)) => {
                format!("its own name {} cannot be resolved there: {error}", own.name)
            }
            (None, None) => format!("its own name {} cannot be resolved there", own.name),
        },
    };
    if !several {
        // Ranks of a single host can also connect over the loopback interface.
        return Some(Finding::note(Subject::Names, found).on(&host.name).means(
            "on one host that does no harm; with several, ranks could not reach each other by Gloo",
        ));
    }
    let is_set = facts.variables.contains_key(GLOO_SOCKET_IFNAME);
    if is_set {
        let found = format!("{found}; {GLOO_SOCKET_IFNAME} makes up for it");
        return Some(Finding::note(Subject::Names, found).on(&host.name));
    }
    let address = cluster.rendezvous_address(place);
    let interface = address.and_then(|it| Some(facts.network.interface_of(it)?.name.clone()));
    let known_as = address.map_or_else(|| "ITS ADDRESS".to_owned(), |it| it.to_string());
    let line = format!("{known_as} {}", own.name);
    let finding = Finding::fail(Subject::Names, found)
        .means(
            "Gloo would send the other ranks an address of the loopback interface, so they would connect \
             to themselves",
        )
        .on(&host.name);
    Some(match (&own.hosts_line, interface) {
        (Some(_), _) => finding
            .remedy(format!("in /etc/hosts there, make the line \"{line}\""))
            .command(format!(
                "sudo sed -i -E '/^127\\.|^::1/ s/[[:space:]]{0}([[:space:]]|$)/ /; $ a {line}' /etc/hosts",
                own.name.replace('.', "\\.")
            )),
        (None, _) if own.addresses.is_empty() => finding
            .remedy("put it into /etc/hosts there")
            .command(format!("echo '{line}' | sudo tee -a /etc/hosts")),
        (None, Some(interface)) => finding
            .remedy("set the interface for Gloo")
            .command(format!("export {GLOO_SOCKET_IFNAME}={interface}")),
        (None, None) => finding.remedy("put its network address into /etc/hosts there"),
    })
}

/// Checks the name of a host as another host resolves it.
fn name_of_peer(
    cluster: &Cluster,
    host: &HostReport,
    other: usize,
    peer: &HostReport,
    known: &Resolution,
) -> Option<Finding> {
    let name = &peer.name;
    let line = match cluster.rendezvous_address(other) {
        Some(address) => format!("{address} {name}"),
        None => format!("ITS ADDRESS {name}"),
    };
    let add = format!("echo '{line}' | sudo tee -a /etc/hosts");
    if known.addresses.is_empty() {
        let mut others = cluster.examined().filter(|(place, ..)| *place != other);
        let unresolved = others.all(|(_, _, facts)| {
            let known = facts.names.iter().find(|it| it.name == *name);
            known.is_none_or(|it| it.addresses.is_empty())
        });
        if unresolved && !peer.here {
            // ssh has reached the host, so its configuration has the name.
            let found = "its name here is defined for ssh only, and the hosts cannot resolve it";
            return Some(
                Finding::note(Subject::Names, found)
                    .means(format!("--master-addr {name} would not work; its address would"))
                    .on(name),
            );
        }
        let why = known.error.as_deref().unwrap_or("no address");
        return Some(
            Finding::warning(Subject::Names, format!("{name} cannot be resolved there: {why}"))
                .means(format!("--master-addr {name} would not work on that host"))
                .remedy("put it into /etc/hosts there, or use addresses")
                .command(add)
                .on(&host.name),
        );
    }
    if known.addresses.iter().all(IpAddr::is_loopback) {
        let found = format!("{name} is {} there{}", known.addresses[0], where_from(known));
        return Some(
            Finding::fail(Subject::Names, found)
                .means(format!("a host that connects to {name} reaches {} instead", host.name))
                .remedy(format!("in /etc/hosts there, make the line \"{line}\""))
                .on(&host.name),
        );
    }
    let theirs = peer.facts.as_ref()?;
    let belongs = |it: &IpAddr| theirs.network.interface_of(*it).is_some();
    if known.addresses.iter().any(belongs) {
        return None;
    }
    let from = cluster.hosts.iter().position(|it| it.name == host.name)?;
    let address = known.addresses[0];
    // Behind network address translation, a host's address may be unknown to the host itself.
    let answers = cluster.route(from, other).is_some_and(|it| it.open_address().is_some());
    let found =
        format!("{name} is {address} there{}, which {name} does not have", where_from(known));
    let finding = if answers {
        Finding::warning(Subject::Names, found)
            .means("it answers nevertheless: addresses are translated on the way")
            .remedy("use names that resolve to the hosts' own addresses, where that is possible")
    } else {
        Finding::fail(Subject::Names, found)
            .means(format!("ranks of {} would look for {name} elsewhere", host.name))
            .remedy(format!("in /etc/hosts there, make the line \"{line}\""))
    };
    Some(finding.on(&host.name))
}

fn where_from(known: &Resolution) -> String {
    match known.hosts_line.as_deref().and_then(|line| line.split_once(':')) {
        Some((number, _)) => format!(" (line {number} of /etc/hosts)"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn resolve(facts: &mut Facts, name: &str, addresses: &[&str], line: Option<&str>) {
        let known = facts.names.iter_mut().find(|it| it.name == name).unwrap();
        known.addresses = addresses.iter().map(|it| it.parse().unwrap()).collect();
        known.hosts_line = line.map(str::to_owned);
        known.error = addresses.is_empty().then(|| "Name or service not known".to_owned());
    }

    #[test]
    fn names_that_lead_where_they_should() {
        fixtures::all_is_well(&check(&fixtures::cluster(1)));
        fixtures::all_is_well(&check(&fixtures::cluster(3)));
    }

    #[test]
    fn debians_line() {
        let mut cluster = fixtures::cluster(2);
        let spoiled = fixtures::facts(&mut cluster, 1);
        resolve(spoiled, "node2", &["127.0.1.1"], Some("2: 127.0.1.1 node2"));
        let findings = check(&cluster);
        let (verdict, hosts, found) = fixtures::only(&findings);
        assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
        assert_eq!(found, "its own name node2 is 127.0.1.1 (line 2 of /etc/hosts)");
        assert!(findings[0].remedy.contains("10.0.0.2 node2"), "{findings:?}");

        let spoiled = fixtures::facts(&mut cluster, 1);
        spoiled.variables.insert(GLOO_SOCKET_IFNAME.to_owned(), "eth0".to_owned());
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Note);

        let mut alone = fixtures::cluster(1);
        resolve(fixtures::facts(&mut alone, 0), "node1", &["127.0.1.1"], None);
        assert_eq!(fixtures::only(&check(&alone)).0, Verdict::Note);
    }

    #[test]
    fn own_names_without_a_use() {
        for (addresses, expected) in [
            (&[][..], "cannot be resolved there: Name or service not known"),
            (&["10.9.9.9"], "which no interface of it has"),
        ] {
            let mut cluster = fixtures::cluster(2);
            resolve(fixtures::facts(&mut cluster, 0), "node1", addresses, None);
            let (verdict, _, found) = fixtures::only(&check(&cluster));
            assert_eq!(verdict, Verdict::Fail);
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn only_ipv6() {
        let mut cluster = fixtures::cluster(2);
        let facts = fixtures::facts(&mut cluster, 0);
        facts.network.interfaces.push(fixtures::interface("eth1", "fd00::1"));
        resolve(facts, "node1", &["fd00::1"], None);
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.contains("IPv6"), "{found}");
    }

    #[test]
    fn names_of_sshs_settings() {
        let mut cluster = fixtures::cluster(3);
        for place in [0, 2] {
            resolve(fixtures::facts(&mut cluster, place), "node2", &[], None);
        }
        let findings = crate::finding::in_order(check(&cluster), 3);
        let (verdict, hosts, found) = fixtures::only(&findings);
        assert_eq!((verdict, hosts.as_str()), (Verdict::Note, "node2"));
        assert!(found.contains("defined for ssh only"), "{found}");
    }

    #[test]
    fn names_of_peers() {
        for (addresses, verdict, expected) in [
            (&[][..], Verdict::Warning, "node1 cannot be resolved there"),
            (&["127.0.0.1"], Verdict::Fail, "node1 is 127.0.0.1 there"),
            (&["10.7.7.7"], Verdict::Fail, "which node1 does not have"),
        ] {
            let mut cluster = fixtures::cluster(3);
            resolve(fixtures::facts(&mut cluster, 2), "node1", addresses, None);
            cluster.routes.retain(|route| route.from != 2);
            let (found_verdict, hosts, found) = fixtures::only(&check(&cluster));
            assert_eq!((found_verdict, hosts.as_str()), (verdict, "node3"));
            assert!(found.contains(expected), "{found}");
        }
        // The same address answers: it is translated on the way.
        let mut cluster = fixtures::cluster(2);
        resolve(fixtures::facts(&mut cluster, 1), "node1", &["10.7.7.7"], None);
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Warning);
    }
}
