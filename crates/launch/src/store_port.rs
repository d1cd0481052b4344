//! A TCP port that no other program is given between choosing it and listening on it.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};

use brigade_world::{StoreEndpoint, StoreHost, own_address};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt,
};

/// From where a port can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// From this host only.
    Loopback,
    /// From every host that reaches this one.
    Everywhere,
}

/// A free port, held for as long as this value lives.
///
/// The socket behind it is bound with `SO_REUSEADDR` and never listens. On Linux that keeps the
/// port from being given to a program that asks for a free one, yet lets rank 0 listen on it: a
/// Brigade program on a socket of [`StorePort::socket_at`], PyTorch's TCPStore on one of its own,
/// which sets `SO_REUSEADDR` too. Binding port 0, closing and passing the number on would leave a
/// moment in which another job gets the same number.
///
/// It is no protection: a program of any user that asks for this very number, and sets
/// `SO_REUSEADDR`, can listen on it before rank 0 does.
///
/// ```
/// use brigade_launch::{Reach, StorePort};
/// let port = StorePort::reserve(Reach::Loopback)?;
/// assert_ne!(port.number(), 0);
/// assert_ne!(StorePort::reserve(Reach::Loopback)?.number(), port.number());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct StorePort {
    _held: OwnedFd,
    addr: SocketAddr,
}

impl StorePort {
    /// Takes a free port. Errors when there is none, or no loopback.
    pub fn reserve(reach: Reach) -> io::Result<Self> {
        let any_v6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let held = match reach {
            Reach::Loopback => bound(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?,
            // `[::]` takes both protocols, and is where PyTorch listens first; a host without IPv6
            // has no such socket.
            Reach::Everywhere => {
                bound(any_v6).or_else(|_| bound(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))))?
            }
        };
        let addr = TcpListener::from(held.try_clone()?).local_addr()?;
        Ok(Self { _held: held, addr })
    }

    /// The port.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.addr.port()
    }

    /// A socket bound to the port, for rank 0 to inherit and listen on. It is not a duplicate of
    /// the one that holds the port: when rank 0 dies no other process keeps its listener open, and
    /// clients see at once that it is gone.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        bound(self.addr)
    }

    /// The same, bound to the one address under which the job's ranks reach this host
    /// ([`own_address`]), so that the store is not served to other networks; where that is not certain,
    /// to all addresses that the port is held at.
    pub fn socket_at(&self, name: &str) -> io::Result<OwnedFd> {
        match own_address(name).map(|address| SocketAddr::from((address, self.number()))) {
            // Fails where another program listens there: at all addresses it would, too.
            Some(at) => bound(at).or_else(|_| self.socket()),
            None => self.socket(),
        }
    }

    /// What to tell ranks on this host.
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

    const REACHES: [Reach; 2] = [Reach::Loopback, Reach::Everywhere];

    #[test]
    fn rank_0_listens_on_the_socket_it_was_given() {
        for reach in REACHES {
            let port = StorePort::reserve(reach).unwrap();
            let socket = port.socket().unwrap();
            let connect = || TcpStream::connect(("127.0.0.1", port.number()));
            assert!(connect().is_err(), "nobody listens yet");
            listen(&socket, Backlog::new(8).unwrap()).unwrap();
            connect().unwrap();
            drop(socket);
            assert!(connect().is_err(), "gone with rank 0");
        }
    }

    #[test]
    fn rank_0_may_bind_the_port_itself() {
        // std sets SO_REUSEADDR, as PyTorch does.
        for reach in REACHES {
            let port = StorePort::reserve(reach).unwrap();
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
        // Another address of this host: all of 127/8 is.
        for (reach, reached) in [(Reach::Loopback, false), (Reach::Everywhere, true)] {
            let port = StorePort::reserve(reach).unwrap();
            let socket = port.socket().unwrap();
            listen(&socket, Backlog::new(8).unwrap()).unwrap();
            let elsewhere = TcpStream::connect(("127.0.0.2", port.number()));
            assert_eq!(elsewhere.is_ok(), reached, "{reach:?}: {elsewhere:?}");
        }
    }

    #[test]
    fn the_store_is_served_at_the_address_of_the_job() {
        // Addresses of this host: all of 127/8 are.
        let reached = |name: &str| {
            let port = StorePort::reserve(Reach::Everywhere).unwrap();
            let socket = port.socket_at(name).unwrap();
            listen(&socket, Backlog::new(8).unwrap()).unwrap();
            ["127.0.0.1", "127.0.0.2"]
                .map(|address| TcpStream::connect((address, port.number())).is_ok())
        };
        assert_eq!(reached("127.0.0.2"), [false, true]);
        assert_eq!(reached("localhost"), [true, false]);
        // A name that means nothing here.
        assert_eq!(reached("no-such-host.invalid"), [true, true]);
    }

    #[test]
    fn no_other_program_is_given_the_port() {
        let reaches = REACHES.into_iter().cycle().take(200);
        let held: Vec<_> = reaches.map(|reach| StorePort::reserve(reach).unwrap()).collect();
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
