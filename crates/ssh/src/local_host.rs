//! Names and addresses of this machine, to recognise it in a list of hosts.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::unistd::gethostname;

use crate::HostSpec;

/// Names and addresses of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalHost {
    /// Host name of this machine.
    pub name: String,
    /// Addresses of this machine, loopback addresses included.
    pub addresses: Vec<IpAddr>,
}

impl LocalHost {
    /// Gathers the names and addresses of this machine.
    #[must_use]
    pub fn gather() -> Self {
        let name = gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
        let interfaces = getifaddrs().ok().into_iter().flatten();
        let addresses = interfaces.filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|it| IpAddr::V4(it.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|it| IpAddr::V6(it.ip())))
        });
        Self { name, addresses: addresses.collect() }
    }

    /// Returns `true` if a host is this machine and needs no ssh: `localhost`, its own name, with or without a domain,
    /// or one of its addresses. With a user, a host needs ssh: the program must run as another user.
    #[must_use]
    pub fn is(&self, host: &HostSpec) -> bool {
        let name = host.name.as_str();
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
        let own_name = !self.name.is_empty()
            && (name == self.name || (!name.contains('.') && name == short(&self.name)));
        let own_address =
            name.parse().is_ok_and(|it: IpAddr| it.is_loopback() || self.addresses.contains(&it));
        host.user.is_none() && (name == "localhost" || own_name || own_address)
    }

    /// Returns the name under which the other hosts reach this machine, given the addresses that they see it under: one
    /// of these addresses if it belongs to this machine (behind a jump host it does not), else the host name.
    #[must_use]
    pub fn name_for_others(&self, seen: &[IpAddr]) -> String {
        let own = seen.iter().find(|it| self.addresses.contains(it));
        own.map_or_else(|| self.name.clone(), ToString::to_string)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine() {
        let here = LocalHost {
            name: "node1.cluster".to_owned(),
            addresses: vec!["127.0.0.1".parse().unwrap(), "10.0.0.1".parse().unwrap()],
        };
        let is_here = |text| here.is(&HostSpec::parse_list(text).unwrap()[0]);
        for name in ["localhost", "node1", "node1.cluster", "10.0.0.1", "127.0.0.1", "[::1]"] {
            assert!(is_here(name), "{name}");
        }
        for name in ["node2", "node1.other", "10.0.0.2", "ada@localhost", "node1x"] {
            assert!(!is_here(name), "{name}");
        }
        let seen = ["192.168.0.7".parse().unwrap(), "10.0.0.1".parse().unwrap()];
        assert_eq!(here.name_for_others(&seen), "10.0.0.1");
        assert_eq!(here.name_for_others(&seen[..1]), "node1.cluster");
        assert_eq!(here.name_for_others(&[]), "node1.cluster");
        let nameless = LocalHost::default();
        assert!(!nameless.is(&HostSpec::parse_list("a").unwrap()[0]));
    }

    #[test]
    fn this_machine_knows_itself() {
        let here = LocalHost::gather();
        assert!(here.addresses.iter().any(IpAddr::is_loopback), "{here:?}");
    }
}
