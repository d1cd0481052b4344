//! Rules by which Gloo and NCCL choose a network interface.

use std::net::{IpAddr, Ipv4Addr};

use crate::facts::{Facts, Interface};

/// Interface that a library would choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum InterfaceChoice {
    /// The library takes an address of this host.
    Takes {
        /// Name of the interface.
        interface: String,
        /// Address that the other ranks get.
        address: IpAddr,
        /// Further interfaces that it would use.
        others: Vec<String>,
    },
    /// The variable names an interface that does not exist.
    Absent {
        /// Value of the variable.
        value: String,
    },
    /// No interface is usable.
    Nothing,
}

impl InterfaceChoice {
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Takes { address, .. } => Some(*address),
            Self::Absent { .. } | Self::Nothing => None,
        }
    }
}

/// Applies PyTorch's rule for Gloo: the interfaces in `GLOO_SOCKET_IFNAME`, by their exact names; or else the first
/// address of the host's own name that is an address of this host; or else 127.0.0.1.
pub(crate) fn gloo(facts: &Facts) -> InterfaceChoice {
    if let Some(value) = variable(facts, GLOO_SOCKET_IFNAME) {
        let names: Vec<&str> = value.split(',').filter(|it| !it.is_empty()).collect();
        let found = |name: &&str| {
            let interfaces = facts.network.interfaces.iter();
            interfaces.filter(|it| it.name == **name).find_map(|it| Some((it, first(it)?)))
        };
        let mut found: Vec<(&Interface, IpAddr)> = names.iter().filter_map(found).collect();
        if found.is_empty() || found.len() < names.len() {
            return InterfaceChoice::Absent { value: value.to_owned() };
        }
        let (interface, address) = found.remove(0);
        let others = found.iter().map(|(it, _)| it.name.clone()).collect();
        return InterfaceChoice::Takes { interface: interface.name.clone(), address, others };
    }
    let own = facts.names.iter().find(|it| it.name == facts.host.name);
    let usable = own.into_iter().flat_map(|it| &it.addresses).find_map(|address| {
        let network = &facts.network;
        // Every address in 127.0.0.0/8 can be bound, whichever the interface has.
        let interface = network.interface_of(*address);
        let name = interface.map(|it| it.name.clone());
        name.or_else(|| address.is_loopback().then(|| "lo".to_owned())).map(|it| (it, *address))
    });
    let (interface, address) =
        usable.unwrap_or_else(|| ("lo".to_owned(), IpAddr::V4(Ipv4Addr::LOCALHOST)));
    InterfaceChoice::Takes { interface, address, others: Vec::new() }
}

/// Applies NCCL's rule: interfaces that match `NCCL_SOCKET_IFNAME`; or else all whose names begin with `ib`; or else
/// all except docker, lo and virbr; or else docker, lo, virbr. The first one is used for the setup.
pub(crate) fn nccl(facts: &Facts) -> InterfaceChoice {
    let family = variable(facts, "NCCL_SOCKET_FAMILY");
    let takes = |matches: &dyn Fn(&str) -> bool| {
        let mut found = candidates(facts, family).into_iter().filter(|(name, _)| matches(name));
        let (interface, address) = found.next()?;
        let others = found.map(|(name, _)| name.to_owned()).collect();
        Some(InterfaceChoice::Takes { interface: interface.to_owned(), address, others })
    };
    if let Some(value) = variable(facts, NCCL_SOCKET_IFNAME).filter(|it| it.len() > 1) {
        let found = takes(&|name| matches(value, name));
        return found.unwrap_or_else(|| InterfaceChoice::Absent { value: value.to_owned() });
    }
    ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"]
        .iter()
        .find_map(|rule| takes(&|name| matches(rule, name)))
        .unwrap_or(InterfaceChoice::Nothing)
}

/// Returns candidates in the system's order: every IPv4 address, then every IPv6 address; an interface counts once.
fn candidates<'a>(facts: &'a Facts, family: Option<&str>) -> Vec<(&'a str, IpAddr)> {
    let mut found: Vec<(&str, IpAddr)> = Vec::new();
    for v6 in [false, true] {
        if family.is_some_and(|it| it == if v6 { "AF_INET" } else { "AF_INET6" }) {
            continue;
        }
        for interface in facts.network.interfaces.iter().filter(|it| it.up) {
            let mut addresses = interface.addresses.iter().map(|it| it.address);
            let wanted = |it: &IpAddr| it.is_ipv6() == v6 && !(v6 && it.is_loopback());
            let known = found.iter().any(|(name, _)| *name == interface.name);
            if let (false, Some(address)) = (known, addresses.find(wanted)) {
                found.push((&interface.name, address));
            }
        }
    }
    found
}

/// Matches a name against NCCL's syntax: `eth,ib` are prefixes, `=eth0` is an exact name, `^` excludes. A port after a
/// colon has no effect here.
pub(crate) fn matches(rule: &str, name: &str) -> bool {
    let (not, rule) = rule.strip_prefix('^').map_or((false, rule), |rest| (true, rest));
    let (whole, rule) = rule.strip_prefix('=').map_or((false, rule), |rest| (true, rest));
    let listed =
        rule.split(',').map(|entry| entry.split(':').next().unwrap_or(entry)).any(|wanted| {
            if whole { wanted == name } else { !wanted.is_empty() && name.starts_with(wanted) }
        });
    listed != not
}

fn first(interface: &Interface) -> Option<IpAddr> {
    interface.addresses.first().map(|it| it.address)
}

fn variable<'a>(facts: &'a Facts, name: &str) -> Option<&'a str> {
    facts.variables.get(name).map(String::as_str).filter(|it| !it.is_empty())
}

pub(crate) const GLOO_SOCKET_IFNAME: &str = "GLOO_SOCKET_IFNAME";
pub(crate) const NCCL_SOCKET_IFNAME: &str = "NCCL_SOCKET_IFNAME";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{host, interface};

    fn taken(pick: &InterfaceChoice) -> (String, String) {
        match pick {
            InterfaceChoice::Takes { interface, address, .. } => {
                (interface.clone(), address.to_string())
            }
            InterfaceChoice::Absent { value } => ("absent".to_owned(), value.clone()),
            InterfaceChoice::Nothing => ("nothing".to_owned(), String::new()),
        }
    }

    #[test]
    fn gloo_follows_the_name_of_the_host() {
        let mut facts = host("node1", "10.0.0.1");
        assert_eq!(taken(&gloo(&facts)), ("eth0".to_owned(), "10.0.0.1".to_owned()));
        let mut name = |addresses: &[&str]| {
            facts.names[0].addresses = addresses.iter().map(|it| it.parse().unwrap()).collect();
            taken(&gloo(&facts)).1
        };
        // As Debian writes it.
        assert_eq!(name(&["127.0.1.1"]), "127.0.1.1");
        // An address that this host has not cannot be bound: the next one is tried.
        assert_eq!(name(&["10.9.9.9", "10.0.0.1"]), "10.0.0.1");
        assert_eq!(name(&["10.9.9.9"]), "127.0.0.1");
        assert_eq!(name(&[]), "127.0.0.1");
    }

    #[test]
    fn gloo_listens_to_its_variable() {
        let mut facts = host("node1", "10.0.0.1");
        facts.network.interfaces.push(interface("ib0", "10.1.0.1"));
        let mut with = |value: &str| {
            facts.variables.insert(GLOO_SOCKET_IFNAME.to_owned(), value.to_owned());
            taken(&gloo(&facts)).1
        };
        assert_eq!(with("ib0"), "10.1.0.1");
        assert_eq!(with("ib0,eth0"), "10.1.0.1");
        assert_eq!(with("ib"), "ib");
        assert_eq!(with("ib0,eth7"), "ib0,eth7");
    }

    #[test]
    fn nccl_avoids_docker() {
        let mut facts = host("node1", "10.0.0.1");
        facts.network.interfaces.insert(1, interface("docker0", "172.17.0.1"));
        facts.network.interfaces.push(interface("eth1", "10.2.0.1"));
        let InterfaceChoice::Takes { interface: name, others, .. } = nccl(&facts) else { panic!() };
        assert_eq!((name.as_str(), others), ("eth0", vec!["eth1".to_owned()]));

        for (value, expected) in [
            ("eth1", "10.2.0.1"),
            ("=eth1", "10.2.0.1"),
            ("=eth", "=eth"),
            ("^eth", "127.0.0.1"),
            ("^lo,eth0", "172.17.0.1"),
            ("wlan", "wlan"),
        ] {
            facts.variables.insert(NCCL_SOCKET_IFNAME.to_owned(), value.to_owned());
            assert_eq!(taken(&nccl(&facts)).1, expected, "{value}");
        }
        facts.variables.clear();
        facts.network.interfaces.push(interface("ibs3", "10.1.0.1"));
        assert_eq!(taken(&nccl(&facts)).0, "ibs3");
        facts.network.interfaces.retain(|it| !it.name.starts_with("eth") && it.name != "ibs3");
        assert_eq!(taken(&nccl(&facts)).0, "docker0");
        facts.network.interfaces.clear();
        assert_eq!(nccl(&facts), InterfaceChoice::Nothing);
    }
}
