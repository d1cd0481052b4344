//! Check that every host can connect to every other on the ports of a job.

use std::net::IpAddr;

use super::some;
use crate::cluster::{AddressSource, Attempt, Cluster, Outcome, Route};
use crate::facts::Facts;
use crate::finding::{Finding, Subject};
use crate::quantity::counted;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = taken(cluster);
    for (to, host, facts) in cluster.examined() {
        let routes: Vec<&Route> = cluster.routes.iter().filter(|route| route.to == to).collect();
        let blocked = routes.iter().filter_map(|route| Some((*route, Blocked::on(route)?)));
        let mut groups: Vec<(Blocked, Vec<&str>)> = Vec::new();
        for (route, blocked) in blocked {
            let from = cluster.hosts[route.from].name.as_str();
            match groups.iter_mut().find(|(have, _)| *have == blocked) {
                Some((_, hosts)) => hosts.push(from),
                None => groups.push((blocked, vec![from])),
            }
        }
        for (blocked, from) in groups {
            let address = cluster.hosts.iter().position(|it| it.name == from[0]);
            let address = address.and_then(|place| cluster.rendezvous_address(place));
            findings.push(blocked.finding(&host.name, facts, &from, address));
        }
    }
    let tried = cluster.routes.iter().filter(|it| !it.attempts.is_empty()).count();
    if findings.is_empty() && tried > 0 {
        let ways = counted(tried, "way is", "ways are");
        findings.push(Finding::ok(Subject::Ports, format!("all {ways} open")));
    } else if findings.is_empty()
        && let (Some(port), Some(host)) = (cluster.master_port, cluster.hosts.first())
        && host.facts.is_some()
    {
        findings.push(Finding::ok(Subject::Ports, format!("port {port} is free")));
    }
    findings
}

/// Reports ports that a host itself could not open.
fn taken(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for host in &cluster.hosts {
        for (port, why) in &host.closed_ports {
            let found = format!("port {port} cannot be listened on: {why}");
            let finding = if cluster.master_port == Some(*port) {
                Finding::fail(Subject::Ports, found)
                    .means("the job's hosts could not meet there")
                    .remedy("end the program that holds it, or choose another --master-port")
            } else {
                Finding::note(Subject::Ports, found).remedy("see which program holds it")
            };
            findings
                .push(finding.command(format!("sudo ss -ltnp 'sport = :{port}'")).on(&host.name));
        }
    }
    findings
}

/// Failure of connections from one host to another.
#[derive(Debug, PartialEq, Eq)]
struct Blocked {
    /// Kind of the failure.
    outcome: Outcome,
    /// Ports that failed, if others are open.
    ports: Vec<u16>,
}

impl Blocked {
    /// Collects the failures of a route. A port counts as open if it is open at one of the host's addresses: programs
    /// try all of them.
    fn on(route: &Route) -> Option<Self> {
        let by_name = |it: &&Attempt| matches!(it.by, AddressSource::Name | AddressSource::Reached);
        let attempts: Vec<&Attempt> = route.attempts.iter().filter(by_name).collect();
        let open = |port: u16| {
            attempts
                .iter()
                .any(|attempt| attempt.address.port() == port && attempt.outcome == Outcome::Open)
        };
        let closed: Vec<&&Attempt> =
            attempts.iter().filter(|it| !open(it.address.port())).collect();
        let outcome = closed.first()?.outcome.clone();
        let mut ports: Vec<u16> = closed.iter().map(|it| it.address.port()).collect();
        ports.dedup();
        let all = attempts.iter().all(|it| !open(it.address.port()));
        Some(Self { outcome, ports: if all { Vec::new() } else { ports } })
    }

    fn finding(&self, to: &str, facts: &Facts, from: &[&str], address: Option<IpAddr>) -> Finding {
        let ports = match &self.ports[..] {
            [] => "none of the ports that were tried".to_owned(),
            ports => {
                let list: Vec<String> = ports.iter().map(u16::to_string).collect();
                format!("not {}", list.join(", "))
            }
        };
        let range = facts.network.any_port_range.unwrap_or((32768, 60999));
        let open = format!(
            "on {to}, let {} in on all TCP ports, or at least {}-{}; and let its answers out",
            some(from),
            range.0,
            range.1
        );
        let (what, means, remedy, command) = match &self.outcome {
            Outcome::Silent => (
                "connections get no answer",
                "a firewall drops them: ranks would wait until their time limit",
                open,
                format!(
                    "sudo ufw allow proto tcp from {}",
                    address.map_or_else(|| "ADDRESS".to_owned(), |it| it.to_string())
                ),
            ),
            Outcome::Refused => (
                "connections are refused",
                "a firewall rejects them, or the address leads to another machine",
                open,
                "sudo nft list ruleset".to_owned(),
            ),
            Outcome::NoRoute => (
                "there is no route",
                "the hosts are in networks that are not connected, or a firewall rejects the packets",
                "see how packets travel".to_owned(),
                format!("ip route get {to}"),
            ),
            Outcome::Stranger => (
                "something else answers",
                "the address leads to another machine, or a proxy stands between",
                format!("check which address {to} has there, and which program listens"),
                format!("getent ahosts {to}"),
            ),
            Outcome::Failed(words) => {
                return self
                    .located(to, from, format!("connections fail ({words}): {ports}"))
                    .remedy("look at the system's messages")
                    .command("journalctl -k -e");
            }
            Outcome::Open => return Finding::ok(Subject::Ports, "open"),
        };
        self.located(to, from, format!("{what}: {ports}"))
            .means(means)
            .remedy(remedy)
            .command(command)
    }

    fn located(&self, to: &str, from: &[&str], found: String) -> Finding {
        let finding = Finding::fail(Subject::Ports, found).towards(to);
        from.iter().fold(finding, |finding, from| finding.on(from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn spoil(cluster: &mut Cluster, to: usize, port: Option<u16>, outcome: &Outcome) {
        for route in cluster.routes.iter_mut().filter(|it| it.to == to) {
            for attempt in &mut route.attempts {
                if port.is_none_or(|port| port == attempt.address.port()) {
                    attempt.outcome = outcome.clone();
                }
            }
        }
    }

    #[test]
    fn open_ways() {
        fixtures::all_is_well(&check(&fixtures::cluster(3)));
        assert_eq!(check(&fixtures::cluster(1)), []);
        let mut alone = fixtures::cluster(1);
        alone.master_port = Some(29500);
        fixtures::all_is_well(&check(&alone));
    }

    #[test]
    fn each_kind_of_wall() {
        for (outcome, expected) in [
            (Outcome::Silent, "no answer"),
            (Outcome::Refused, "refused"),
            (Outcome::NoRoute, "no route"),
            (Outcome::Stranger, "something else"),
            (Outcome::Failed("odd".to_owned()), "odd"),
        ] {
            let mut cluster = fixtures::cluster(3);
            spoil(&mut cluster, 1, None, &outcome);
            let findings = check(&cluster);
            let (verdict, hosts, found) = fixtures::only(&findings);
            // One line for both of the others.
            assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node1,node3"));
            assert_eq!(findings[0].towards.as_deref(), Some("node2"));
            assert!(found.contains(expected) && found.contains("none of"), "{found}");
        }
    }

    #[test]
    fn one_port_and_one_direction() {
        let mut cluster = fixtures::cluster(2);
        spoil(&mut cluster, 0, Some(40002), &Outcome::Silent);
        let (_, hosts, found) = fixtures::only(&check(&cluster));
        assert_eq!(hosts, "node2");
        assert!(found.ends_with("not 40002"), "{found}");
    }

    #[test]
    fn a_second_address_helps() {
        let mut cluster = fixtures::cluster(2);
        let route = &mut cluster.routes[0];
        let mut other = route.attempts.clone();
        for attempt in &mut other {
            attempt.address.set_ip("fd00::2".parse().unwrap());
            attempt.outcome = Outcome::NoRoute;
        }
        route.attempts.splice(0..0, other);
        fixtures::all_is_well(&check(&cluster));
    }

    #[test]
    fn a_port_in_use() {
        let mut cluster = fixtures::cluster(2);
        cluster.hosts[0].closed_ports = vec![(29500, "address already in use".to_owned())];
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Note);
        cluster.master_port = Some(29500);
        let (verdict, hosts, found) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node1"));
        assert!(found.contains("29500"), "{found}");
    }
}
