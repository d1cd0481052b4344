//! Endpoint of the key-value store through which the ranks meet, and from which every process group starts.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};
use std::os::fd::RawFd;

/// Address of the store, and the process that serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreEndpoint {
    /// Host name or address of the server, as in `MASTER_ADDR`.
    pub addr: String,
    /// Port of the server. 0 only for a program that runs alone: the listener picks a free one.
    pub port: u16,
    /// Process that serves the store.
    pub host: StoreHost,
}

impl StoreEndpoint {
    /// Returns the endpoint of a store for one process: on the loopback address, at a port that the listener picks.
    #[must_use]
    pub fn alone() -> Self {
        Self { addr: "127.0.0.1".to_owned(), port: 0, host: StoreHost::Rank0 }
    }
}

/// Returns this host's own address on which to serve a store that others reach under this name or address.
///
/// `None` if it has to be served at all addresses: the name is not this host's (behind a translated
/// address, say), has several addresses, or means the loopback here, as Debian's `/etc/hosts` has it,
/// and another address elsewhere. Asks the system's resolver, which may take its time for a name.
///
/// ```
/// use brigade_rank_env::own_address;
/// assert_eq!(own_address("127.0.0.1"), Some([127, 0, 0, 1].into()));
/// assert_eq!(own_address("localhost"), Some([127, 0, 0, 1].into()));
/// assert_eq!(own_address("192.0.2.1"), None, "an address for examples is nowhere");
/// ```
#[must_use]
pub fn own_address(name: &str) -> Option<IpAddr> {
    // Only addresses of this host can be bound to.
    let is_own = |address: &IpAddr| UdpSocket::bind((*address, 0)).is_ok();
    let plain = name.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(name);
    if name == "localhost" {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    if let Ok(address) = plain.parse::<IpAddr>() {
        return Some(address).filter(|address| !address.is_unspecified() && is_own(address));
    }
    let mut addresses = (name, 0).to_socket_addrs().ok()?.map(|it| it.ip().to_canonical());
    let first = addresses.next()?;
    let is_only = addresses.all(|other| other == first);
    (is_only && !first.is_loopback() && is_own(&first)).then_some(first)
}

/// Returns `true` if an address stands for this host and no other: `localhost`, or a loopback address of IPv4 or IPv6.
///
/// ```
/// use brigade_rank_env::is_loopback;
/// assert!(is_loopback("localhost") && is_loopback("127.0.0.1") && is_loopback("::1"));
/// assert!(!is_loopback("node1") && !is_loopback("0.0.0.0"));
/// ```
#[must_use]
pub fn is_loopback(addr: &str) -> bool {
    addr == "localhost" || addr.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Process that serves the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreHost {
    /// The launcher serves it and every rank is a client: torchrun with
    /// `TORCHELASTIC_USE_AGENT_STORE=True`.
    Agent,
    /// Rank 0 binds the port and serves the store; the other ranks are clients.
    Rank0,
    /// Rank 0 serves on this inherited socket, which is bound to the port and does not listen yet.
    /// Only rank 0 sees this value; the descriptor is its own and may be closed with the store.
    Rank0Fd(RawFd),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_certainly_is_this_hosts_own() {
        assert_eq!(own_address("127.0.0.9"), Some([127, 0, 0, 9].into()));
        for name in ["0.0.0.0", "::", "no-such-host.invalid", "", "192.0.2.1", "2001:db8::1", "a b"]
        {
            assert_eq!(own_address(name), None, "{name}");
        }
        if UdpSocket::bind("[::1]:0").is_ok() {
            let loopback: IpAddr = "::1".parse().unwrap();
            assert_eq!([own_address("::1"), own_address("[::1]")], [Some(loopback); 2]);
        }
    }
}
