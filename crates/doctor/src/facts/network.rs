//! Facts about network interfaces, in the order in which libraries see them.

use std::net::{IpAddr, Ipv4Addr};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use serde::{Deserialize, Serialize};

use brigade_hardware::Sources;

/// Network interfaces and addresses of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// All interfaces, in the kernel's order.
    pub interfaces: Vec<Interface>,
    /// Active ports of InfiniBand adapters, such as `mlx5_0/1`.
    pub infiniband: Vec<String>,
    /// First and last port of the ephemeral range, from which the system takes ports.
    pub any_port_range: Option<(u16, u16)>,
    /// Interface of the default route.
    pub default_interface: Option<String>,
    /// Address at which the ssh client reached this host.
    pub reached_at: Option<IpAddr>,
}

/// Network interface with its addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// `true` if the interface is enabled.
    pub up: bool,
    /// `true` if the interface has a carrier, such as a connected cable.
    pub running: bool,
    /// `true` for a loopback interface.
    pub loopback: bool,
    /// MTU: the largest packet in bytes, if known.
    pub mtu: Option<u32>,
    /// Addresses of the interface.
    pub addresses: Vec<InterfaceAddress>,
}

/// Address of a network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// IPv4 or IPv6 address.
    pub address: IpAddr,
    /// Length of the network prefix in bits.
    pub prefix: u8,
}

impl Network {
    pub(super) fn gather(sources: &Sources) -> Self {
        let range = sources.value("/proc/sys/net/ipv4/ip_local_port_range");
        let routes = sources.read("/proc/self/net/route").unwrap_or_default();
        Self {
            interfaces: interfaces(sources),
            infiniband: infiniband(sources),
            any_port_range: range.and_then(|text| {
                let mut numbers = text.split_whitespace().map(str::parse);
                Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
            }),
            default_interface: routes.lines().skip(1).find_map(|line| {
                let mut fields = line.split_whitespace();
                let (name, to) = (fields.next()?, fields.next()?);
                (to == "00000000").then(|| name.to_owned())
            }),
            reached_at: sources
                .variable("SSH_CONNECTION")
                .and_then(|text| text.split(' ').nth(2)?.parse().ok()),
        }
    }

    /// Returns the interface that has this address.
    #[must_use]
    pub fn interface_of(&self, address: IpAddr) -> Option<&Interface> {
        self.interfaces.iter().find(|it| it.addresses.iter().any(|have| have.address == address))
    }
}

impl InterfaceAddress {
    /// Returns `true` if another address is in the same network.
    ///
    /// ```
    /// use brigade_doctor::InterfaceAddress;
    /// let ours = InterfaceAddress { address: [10, 0, 1, 7].into(), prefix: 24 };
    /// assert!(ours.is_near([10, 0, 1, 200].into()));
    /// assert!(!ours.is_near([10, 0, 2, 7].into()));
    /// ```
    #[must_use]
    pub fn is_near(&self, other: IpAddr) -> bool {
        let (ours, theirs, bits) = match (self.address, other) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                (u128::from(ours.to_bits()), u128::from(theirs.to_bits()), Ipv4Addr::BITS)
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => (ours.to_bits(), theirs.to_bits(), 128),
            _ => return false,
        };
        let host_bits = bits.saturating_sub(self.prefix.into());
        ours.checked_shr(host_bits) == theirs.checked_shr(host_bits)
    }
}

fn interfaces(sources: &Sources) -> Vec<Interface> {
    let mut interfaces: Vec<Interface> = Vec::new();
    for entry in getifaddrs().into_iter().flatten() {
        let position = interfaces.iter().position(|it| it.name == entry.interface_name);
        let index = position.unwrap_or_else(|| {
            interfaces.push(Interface {
                name: entry.interface_name.clone(),
                up: entry.flags.contains(InterfaceFlags::IFF_UP),
                running: entry.flags.contains(InterfaceFlags::IFF_RUNNING),
                loopback: entry.flags.contains(InterfaceFlags::IFF_LOOPBACK),
                ..Interface::default()
            });
            interfaces.len() - 1
        });
        let interface = &mut interfaces[index];
        let Some(address) = &entry.address else { continue };
        if let Some(link) = address.as_link_addr() {
            interface.mtu = mtu(sources, &entry.interface_name, link.ifindex(), link.addr());
        }
        let ip = |address: &nix::sys::socket::SockaddrStorage| {
            let v4 = address.as_sockaddr_in().map(|it| IpAddr::V4(it.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|it| IpAddr::V6(it.ip())))
        };
        if let Some(address) = ip(address) {
            let ones = match entry.netmask.as_ref().and_then(ip) {
                Some(IpAddr::V4(mask)) => mask.to_bits().leading_ones(),
                Some(IpAddr::V6(mask)) => mask.to_bits().leading_ones(),
                None => 0,
            };
            interface.addresses.push(InterfaceAddress { address, prefix: ones as u8 });
        }
    }
    interfaces
}

/// Returns the MTU from `/sys`, which may belong to another network namespace, where the name is another interface's.
/// So its value counts only if index and hardware address match. The IPv6 setting always belongs to this namespace, but
/// may be lower than the interface's own value.
fn mtu(sources: &Sources, name: &str, index: usize, hardware: Option<[u8; 6]>) -> Option<u32> {
    let read = |file: &str| sources.value(format!("/sys/class/net/{name}/{file}"));
    let written = hardware.map(|bytes| bytes.map(|byte| format!("{byte:02x}")).join(":"));
    let ours = read("ifindex") == Some(index.to_string()) && read("address") == written;
    let value = if ours { read("mtu") } else { None };
    value
        .or_else(|| sources.value(format!("/proc/sys/net/ipv6/conf/{name}/mtu")))
        .and_then(|text| text.parse().ok())
}

fn infiniband(sources: &Sources) -> Vec<String> {
    let mut active = Vec::new();
    for adapter in sources.names("/sys/class/infiniband") {
        for port in sources.names(format!("/sys/class/infiniband/{adapter}/ports")) {
            let file = format!("/sys/class/infiniband/{adapter}/ports/{port}/state");
            if sources.value(file).is_some_and(|state| state.contains("ACTIVE")) {
                active.push(format!("{adapter}/{port}"));
            }
        }
    }
    active
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_loopback() {
        let network = Network::gather(&Sources::system());
        let interface = network.interface_of([127, 0, 0, 1].into()).unwrap();
        assert!(interface.loopback && interface.up);
        assert!(interface.mtu.is_some_and(|mtu| mtu >= 1280), "{interface:?}");
    }

    #[test]
    fn networks() {
        let ours = InterfaceAddress { address: "fd00::1".parse().unwrap(), prefix: 64 };
        assert!(ours.is_near("fd00::ffff:1".parse().unwrap()));
        assert!(!ours.is_near("fd01::1".parse().unwrap()));
        assert!(!ours.is_near([10, 0, 0, 1].into()));
        let everything = InterfaceAddress { address: [10, 0, 0, 1].into(), prefix: 0 };
        assert!(everything.is_near([192, 0, 2, 1].into()));
    }

    #[test]
    fn infiniband_ports() {
        let root = tempfile::tempdir().unwrap();
        for (port, state) in [("1", "4: ACTIVE\n"), ("2", "1: DOWN\n")] {
            let folder = root.path().join("sys/class/infiniband/mlx5_0/ports").join(port);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("state"), state).unwrap();
        }
        assert_eq!(infiniband(&Sources::under(root.path())), ["mlx5_0/1"]);
    }
}
