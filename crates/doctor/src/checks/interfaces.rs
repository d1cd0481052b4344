//! Check of the network interfaces that Gloo and NCCL would choose, and whether other hosts reach them.

use std::net::IpAddr;

use super::{groups, who_has_what};
use crate::cluster::{AddressSource, Cluster, HostReport, Outcome};
use crate::facts::Facts;
use crate::finding::{Finding, Subject};
use crate::interface_choice::{self, GLOO_SOCKET_IFNAME, InterfaceChoice, NCCL_SOCKET_IFNAME};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let gpus = cluster.examined().any(|(_, _, facts)| facts.devices.use_nccl());
    let mut findings = Vec::new();
    let mut summary = Vec::new();
    let several = cluster.hosts.len() > 1;
    let mut useless = false;
    for (place, host, facts) in cluster.examined() {
        let gloo = Library {
            name: "Gloo",
            variable: GLOO_SOCKET_IFNAME,
            way: AddressSource::Gloo,
            matters: true,
        };
        let nccl = Library {
            name: "NCCL",
            variable: NCCL_SOCKET_IFNAME,
            way: AddressSource::Nccl,
            matters: gpus,
        };
        let mut taken = Vec::new();
        for (library, pick) in
            [(gloo, interface_choice::gloo(facts)), (nccl, interface_choice::nccl(facts))]
        {
            if let InterfaceChoice::Takes { interface, .. } = &pick {
                taken.push(format!("{} takes {interface}", library.name));
            }
            // The check of names has reported it, and this line would seem to contradict it.
            useless |=
                several && library.matters && pick.address().is_none_or(|it| it.is_loopback());
            findings.extend(library.judge(cluster, place, host, facts, &pick));
        }
        summary.push((host.name.as_str(), taken.join(", ")));
        let rendezvous = cluster.rendezvous_address(place);
        let own = rendezvous.and_then(|it| facts.network.interface_of(it));
        if own.is_some_and(|it| !it.running) {
            findings.push(
                Finding::warning(
                    Subject::Interfaces,
                    "the interface to the other hosts has no carrier",
                )
                .remedy("see whether its cable is plugged in")
                .command("ip -br link")
                .on(&host.name),
            );
        }
    }
    if findings.is_empty() && !summary.is_empty() && !useless {
        let groups = groups(summary);
        let found = match &groups[..] {
            [(same, _)] => same.clone(),
            _ => who_has_what(&groups),
        };
        findings.push(Finding::ok(Subject::Interfaces, found));
    }
    findings
}

struct Library {
    name: &'static str,
    variable: &'static str,
    way: AddressSource,
    /// `true` if the library is used: NCCL needs GPUs.
    matters: bool,
}

impl Library {
    fn judge(
        &self,
        cluster: &Cluster,
        place: usize,
        host: &HostReport,
        facts: &Facts,
        pick: &InterfaceChoice,
    ) -> Option<Finding> {
        let rendezvous = cluster.rendezvous_address(place);
        let wanted = rendezvous.and_then(|it| facts.network.interface_of(it));
        let wanted = wanted.map(|it| it.name.as_str());
        let choose = format!("export {}={}", self.variable, wanted.unwrap_or("INTERFACE"));
        let (interface, address, others) = match pick {
            InterfaceChoice::Takes { interface, address, others } => (interface, *address, others),
            InterfaceChoice::Absent { value } => {
                let found =
                    format!("{}={value} names no interface that has an address", self.variable);
                let names = facts.network.interfaces.iter().filter(|it| !it.addresses.is_empty());
                let names: Vec<&str> = names.map(|it| it.name.as_str()).collect();
                let finding = if self.matters {
                    Finding::fail(Subject::Interfaces, found)
                } else {
                    Finding::warning(Subject::Interfaces, found)
                };
                return Some(
                    finding
                        .means(format!("{} would give up at the start", self.name))
                        .remedy(format!("choose one of {}, or unset it", names.join(", ")))
                        .command(choose)
                        .on(&host.name),
                );
            }
            InterfaceChoice::Nothing if self.matters && cluster.hosts.len() > 1 => {
                return Some(
                    Finding::fail(Subject::Interfaces, format!("{} finds no interface", self.name))
                        .remedy("give an interface an address")
                        .command("ip -br address")
                        .on(&host.name),
                );
            }
            InterfaceChoice::Nothing => return None,
        };
        if cluster.hosts.len() < 2 || !self.matters {
            return None;
        }
        // A failure by name is reported by the check of names, with a better remedy.
        let by_variable = facts.variables.contains_key(self.variable);
        if address.is_loopback() {
            return (by_variable || self.way == AddressSource::Nccl).then(|| {
                Finding::fail(
                    Subject::Interfaces,
                    format!("{} would take {interface} ({address})", self.name),
                )
                .means("no other host can reach that")
                .remedy("choose the interface to the other hosts")
                .command(choose)
                .on(&host.name)
            });
        }
        if rendezvous == Some(address) || Some(interface.as_str()) == wanted {
            let strangers: Vec<&str> =
                others.iter().map(String::as_str).filter(|it| Some(*it) != wanted).collect();
            // NCCL uses all of them at once, whichever is used for the setup.
            return (!strangers.is_empty() && !by_variable && self.way == AddressSource::Nccl)
                .then(|| {
                    let found = format!(
                        "NCCL would use {}, too, not only {interface}",
                        strangers.join(", ")
                    );
                    Finding::note(Subject::Interfaces, found)
                        .means(
                            "correct if those lead to the other hosts, too; otherwise connections fail",
                        )
                        .remedy("choose, if they do not")
                        .command(choose)
                        .on(&host.name)
                });
        }
        let known_as = rendezvous.map_or_else(|| "another".to_owned(), |it| it.to_string());
        let found = format!(
            "{} would take {interface} ({address}), but the other hosts reach this one at {known_as}",
            self.name
        );
        let finding = match (self.reached(cluster, place, address), is_virtual(interface)) {
            // Not a fault: ssh often uses one network and the data a faster one.
            (true, false) => Finding::note(Subject::Interfaces, found)
                .means("they reach that address, too; right if it is the faster network"),
            (true, true) => Finding::warning(Subject::Interfaces, found)
                .means("they reach that address, too, but it is one for containers")
                .remedy("choose the interface to the other hosts"),
            (false, _) => Finding::fail(Subject::Interfaces, found)
                .means("the others cannot reach the address that it sends them")
                .remedy("choose the interface to the other hosts"),
        };
        Some(finding.command(choose).on(&host.name))
    }

    /// Returns `true` if every host that tried could connect to that address.
    fn reached(&self, cluster: &Cluster, place: usize, address: IpAddr) -> bool {
        let routes = cluster.routes.iter().filter(|route| route.to == place);
        let mut attempts =
            routes.flat_map(|it| &it.attempts).filter(|it| it.address.ip() == address).peekable();
        attempts.peek().is_some() && attempts.all(|it| it.outcome == Outcome::Open)
    }
}

/// Returns `true` for an interface that software created for this host's containers and virtual machines.
fn is_virtual(interface: &str) -> bool {
    VIRTUAL.iter().any(|start| interface.starts_with(start))
}

const VIRTUAL: &[&str] = &["br-", "cni", "docker", "flannel", "lxc", "podman", "veth", "virbr"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Attempt;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn set(facts: &mut Facts, name: &str, value: &str) {
        facts.variables.insert(name.to_owned(), value.to_owned());
    }

    #[test]
    fn both_take_the_network_of_the_hosts() {
        let findings = check(&fixtures::cluster(3));
        fixtures::all_is_well(&findings);
        assert_eq!(findings[0].found, "Gloo takes eth0, NCCL takes eth0");
        fixtures::all_is_well(&check(&fixtures::cluster(1)));
    }

    #[test]
    fn a_variable_names_what_is_not_there() {
        let mut cluster = fixtures::cluster(2);
        set(fixtures::facts(&mut cluster, 1), GLOO_SOCKET_IFNAME, "ens5");
        let findings = check(&cluster);
        let (verdict, hosts, found) = fixtures::only(&findings);
        assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
        assert!(found.contains("GLOO_SOCKET_IFNAME=ens5"), "{found}");
        assert_eq!(findings[0].command, "export GLOO_SOCKET_IFNAME=eth0");

        // NCCL has no work without GPUs.
        let mut cluster = fixtures::cluster(2);
        set(fixtures::facts(&mut cluster, 0), NCCL_SOCKET_IFNAME, "ens5");
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Warning);
        fixtures::facts(&mut cluster, 0).devices = fixtures::devices(1);
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Fail);
    }

    #[test]
    fn a_variable_chooses_the_loopback() {
        let mut cluster = fixtures::cluster(2);
        set(fixtures::facts(&mut cluster, 1), GLOO_SOCKET_IFNAME, "lo");
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Fail);
        assert!(found.contains("would take lo"), "{found}");
    }

    #[test]
    fn a_name_that_leads_to_docker() {
        let mut cluster = fixtures::cluster(2);
        let facts = fixtures::facts(&mut cluster, 1);
        facts.network.interfaces.push(fixtures::interface("docker0", "172.17.0.1"));
        facts.names[0].addresses = vec!["172.17.0.1".parse().unwrap()];
        cluster.routes[0].attempts.push(Attempt {
            by: AddressSource::Gloo,
            address: "172.17.0.1:4000".parse().unwrap(),
            outcome: Outcome::Refused,
        });
        let (verdict, hosts, found) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
        assert!(found.contains("docker0 (172.17.0.1)") && found.contains("10.0.0.2"), "{found}");
        cluster.routes[0].attempts[2].outcome = Outcome::Open;
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Warning);
        // Another network between the same hosts may be the one that is meant for data.
        fixtures::facts(&mut cluster, 1).network.interfaces[2].name = "ens7".to_owned();
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Note);
    }

    #[test]
    fn several_for_nccl() {
        let mut cluster = fixtures::cluster(2);
        let facts = fixtures::facts(&mut cluster, 0);
        facts.devices = fixtures::devices(1);
        facts.network.interfaces.push(fixtures::interface("wlan0", "192.168.1.5"));
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Note);
        assert!(found.contains("wlan0"), "{found}");
    }

    #[test]
    fn no_carrier() {
        let mut cluster = fixtures::cluster(2);
        fixtures::facts(&mut cluster, 0).network.interfaces[1].running = false;
        assert!(fixtures::only(&check(&cluster)).2.contains("no carrier"));
    }
}
