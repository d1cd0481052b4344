//! Reservation of a TCP port between choosing it and listening on it.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::str::FromStr;

use brigade_rank_env::{StoreEndpoint, StoreHost, own_address};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt,
};
use serde::{Deserialize, Serialize};

use crate::ValueError;

/// Network interfaces on which a port listens, and so the hosts from which it can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interfaces {
    /// The loopback interface: the port can be reached from this host only.
    Loopback,
    /// All interfaces: the port can be reached from every host of the network.
    All,
}

/// Range of the ports that the ranks' store may use (`--store-port`), for a firewall that lets these through.
///
/// ```
/// use brigade_launch::PortRange;
/// let range: PortRange = "29500-29510".parse()?;
/// assert_eq!((range.first, range.last), (29500, 29510));
/// assert_eq!("29500".parse::<PortRange>()?.to_string(), "29500");
/// assert!("29510-29500".parse::<PortRange>().is_err());
/// # Ok::<(), brigade_launch::ValueError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortRange {
    /// Lowest port of the range.
    pub first: u16,
    /// Highest port of the range.
    pub last: u16,
}

impl FromStr for PortRange {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (port(first), port(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Self { first, last }),
            _ => Err(ValueError::expected("a port from 1 to 65535, or FIRST-LAST", text)),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

/// Ports that the user has chosen for the ranks' store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChosenPorts {
    /// Range of the ports.
    pub ports: PortRange,
    /// Source of the choice, for errors: `flag --store-port`.
    pub source: String,
}

/// Reserved free port, held for as long as this value lives.
///
/// The socket behind it is bound with `SO_REUSEADDR` and never listens. On Linux that keeps the
/// port from being given to a program that asks for a free one, yet lets rank 0 listen on it: a
/// Brigade program on a socket of [`StorePort::socket_at`], PyTorch's TCPStore on one of its own,
/// which sets `SO_REUSEADDR` too. Binding port 0, closing and passing the number on would leave a
/// moment in which another job gets the same number.
///
/// This is not a protection: a program of any user that asks for this very number, and sets
/// `SO_REUSEADDR`, can listen on it before rank 0 does.
///
/// ```
/// use brigade_launch::{Interfaces, StorePort};
/// let port = StorePort::reserve(Interfaces::Loopback)?;
/// assert_ne!(port.number(), 0);
/// assert_ne!(StorePort::reserve(Interfaces::Loopback)?.number(), port.number());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct StorePort {
    _held: OwnedFd,
    addr: SocketAddr,
}

impl StorePort {
    /// Reserves a port that the system chooses.
    ///
    /// # Errors
    ///
    /// No port is free, or the host has no loopback interface.
    pub fn reserve(interfaces: Interfaces) -> io::Result<Self> {
        Self::at(interfaces, 0)
    }

    /// Reserves the first port of a range that is not in use.
    ///
    /// # Errors
    ///
    /// All ports of the range are in use, or cannot be bound.
    pub fn reserve_in(interfaces: Interfaces, range: PortRange) -> io::Result<Self> {
        let mut error = None;
        for port in range.first..=range.last {
            match Self::at(interfaces, port) {
                Ok(port) => return Ok(port),
                Err(refused) => error = Some(refused),
            }
        }
        Err(error.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }

    fn at(interfaces: Interfaces, port: u16) -> io::Result<Self> {
        let held = match interfaces {
            Interfaces::Loopback => bound(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?,
            // `[::]` takes both protocols, and is where PyTorch listens first; a host without IPv6
            // has no such socket.
            Interfaces::All => match bound(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
                Err(_) => bound(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?,
                Ok(held) => held,
            },
        };
        let addr = TcpListener::from(held.try_clone()?).local_addr()?;
        Ok(Self { _held: held, addr })
    }

    /// Returns the port number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.addr.port()
    }

    /// Returns a socket bound to the port, for rank 0 to inherit and listen on. It is not a duplicate of the one that
    /// holds the port: when rank 0 dies, no other process keeps its listener open, and clients detect it at once.
    ///
    /// # Errors
    /// The system refuses to create or bind the socket.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        bound(self.addr)
    }

    /// Returns a socket like [`Self::socket`], bound to the one address under which the job's ranks reach this host
    /// ([`own_address`]), so that the store is not served to other networks. If that address is not certain, the socket
    /// is bound to all addresses at which the port is reserved.
    ///
    /// # Errors
    /// The system refuses to create or bind the socket.
    pub fn socket_at(&self, name: &str) -> io::Result<OwnedFd> {
        match own_address(name).map(|address| SocketAddr::from((address, self.number()))) {
            // Fails if another program listens at the address; binding all addresses would fail, too.
            Some(at) => bound(at).or_else(|_| self.socket()),
            None => self.socket(),
        }
    }

    /// Returns the endpoint of the store for ranks on this host.
    #[must_use]
    pub fn endpoint(&self, host: StoreHost) -> StoreEndpoint {
        StoreEndpoint { addr: Ipv4Addr::LOCALHOST.to_string(), port: self.number(), host }
    }
}

fn bound(addr: SocketAddr) -> io::Result<OwnedFd> {
    let family = if addr.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    if addr.is_ipv6() {
        setsockopt(&socket, sockopt::Ipv6V6Only, &false)?;
    }
    bind(socket.as_raw_fd(), &SockaddrStorage::from(addr))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use nix::sys::socket::{Backlog, SockaddrIn, listen};

    use super::*;

    const BOTH: [Interfaces; 2] = [Interfaces::Loopback, Interfaces::All];

    #[test]
    fn rank_0_listens_on_the_socket_it_was_given() {
        for interfaces in BOTH {
            let port = StorePort::reserve(interfaces).unwrap();
            let socket = port.socket().unwrap();
            let connect = || TcpStream::connect(("127.0.0.1", port.number()));
            assert!(connect().is_err(), "nothing listens yet");
            listen(&socket, Backlog::new(8).unwrap()).unwrap();
            connect().unwrap();
            drop(socket);
            assert!(connect().is_err(), "gone with rank 0");
        }
    }

    #[test]
    fn rank_0_may_bind_the_port_itself() {
        // std sets SO_REUSEADDR, as PyTorch does.
        for interfaces in BOTH {
            let port = StorePort::reserve(interfaces).unwrap();
            let _inherited = port.socket().unwrap();
            for address in ["127.0.0.1", "0.0.0.0"] {
                let _listener = TcpListener::bind((address, port.number())).unwrap();
                TcpStream::connect(("127.0.0.1", port.number())).unwrap();
            }
            // [::], where PyTorch listens first; a host without IPv6 has no such socket.
            let Ok(any) = bound(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port.number()))) else {
                continue;
            };
            listen(&any, Backlog::new(8).unwrap()).unwrap();
            TcpStream::connect(("127.0.0.1", port.number())).unwrap();
        }
    }

    #[test]
    fn only_where_it_should_be_reached() {
        // Another address of this host: all of 127/8 are.
        for (interfaces, reached) in [(Interfaces::Loopback, false), (Interfaces::All, true)] {
            let port = StorePort::reserve(interfaces).unwrap();
            let socket = port.socket().unwrap();
            listen(&socket, Backlog::new(8).unwrap()).unwrap();
            let elsewhere = TcpStream::connect(("127.0.0.2", port.number()));
            assert_eq!(elsewhere.is_ok(), reached, "{interfaces:?}: {elsewhere:?}");
        }
    }

    #[test]
    fn a_range_gives_its_first_port_on_which_nothing_listens() {
        for interfaces in BOTH {
            // Adjacent ports that were free a moment ago.
            let range = loop {
                let first = StorePort::reserve(interfaces).unwrap().number();
                let Some(last) = first.checked_add(2) else { continue };
                if (first..=last).all(|port| StorePort::at(interfaces, port).is_ok()) {
                    break PortRange { first, last };
                }
            };
            let port = StorePort::reserve_in(interfaces, range).unwrap();
            assert_eq!(port.number(), range.first);
            // As by rank 0 of another job.
            let socket = port.socket().unwrap();
            listen(&socket, Backlog::new(8).unwrap()).unwrap();
            assert_eq!(StorePort::reserve_in(interfaces, range).unwrap().number(), range.first + 1);
            let only = PortRange { last: range.first, ..range };
            let error = StorePort::reserve_in(interfaces, only).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
            // Once the attempt before it is dropped, the port is free again.
            drop((socket, port));
            assert_eq!(StorePort::reserve_in(interfaces, only).unwrap().number(), range.first);
        }
    }

    #[test]
    fn the_store_is_served_at_the_address_of_the_job() {
        // Addresses of this host: all of 127/8 are.
        let reached = |name: &str| {
            let port = StorePort::reserve(Interfaces::All).unwrap();
            let socket = port.socket_at(name).unwrap();
            listen(&socket, Backlog::new(8).unwrap()).unwrap();
            ["127.0.0.1", "127.0.0.2"]
                .map(|address| TcpStream::connect((address, port.number())).is_ok())
        };
        assert_eq!(reached("127.0.0.2"), [false, true]);
        assert_eq!(reached("localhost"), [true, false]);
        // A name that cannot be resolved.
        assert_eq!(reached("no-such-host.invalid"), [true, true]);
    }

    #[test]
    fn no_other_program_is_given_the_port() {
        let both = BOTH.into_iter().cycle().take(200);
        let held: Vec<_> = both.map(|interfaces| StorePort::reserve(interfaces).unwrap()).collect();
        let mut numbers: Vec<_> = held.iter().map(StorePort::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), held.len());
        // A socket without SO_REUSEADDR cannot take it even by number.
        for port in &held[..2] {
            let plain = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
            let plain = plain.unwrap();
            let taken = bind(plain.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port.number()));
            assert_eq!(taken, Err(nix::Error::EADDRINUSE));
        }
    }
}
