//! A TCP port that nobody else can take between choosing it and listening on it.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use brigade_world::{StoreEndpoint, StoreHost};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket, sockopt,
};

/// A free port on the loopback, held for as long as this value lives.
///
/// The socket behind it is bound with `SO_REUSEADDR` and never listens. On Linux that keeps the
/// port from being given to anyone who asks for a free one, yet lets rank 0 listen on it: a
/// Brigade program on a socket of [`StorePort::socket`], PyTorch's TCPStore on one of its own,
/// which sets `SO_REUSEADDR` too. Binding port 0, closing and passing the number on would leave a
/// moment in which another job gets the same number.
///
/// ```
/// use brigade_launch::StorePort;
/// let port = StorePort::reserve()?;
/// assert_ne!(port.number(), 0);
/// assert_ne!(StorePort::reserve()?.number(), port.number());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct StorePort {
    _held: OwnedFd,
    number: u16,
}

impl StorePort {
    /// Takes a free port. Errors when there is none, or no loopback.
    pub fn reserve() -> io::Result<Self> {
        let held = bound(0)?;
        let number = getsockname::<SockaddrIn>(held.as_raw_fd())?.port();
        Ok(Self { _held: held, number })
    }

    /// The port.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// A socket bound to the port, for rank 0 to inherit and listen on. It is not a duplicate of
    /// the one that holds the port: when rank 0 dies nobody else keeps its listener open, and
    /// clients see at once that it is gone.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        bound(self.number)
    }

    /// What to tell the ranks.
    #[must_use]
    pub fn endpoint(&self, host: StoreHost) -> StoreEndpoint {
        StoreEndpoint { addr: Ipv4Addr::LOCALHOST.to_string(), port: self.number, host }
    }
}

fn bound(port: u16) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv6Addr, TcpListener, TcpStream};

    use nix::sys::socket::{Backlog, SockaddrIn6, listen};

    use super::*;

    #[test]
    fn rank_0_listens_on_the_socket_it_was_given() {
        let port = StorePort::reserve().unwrap();
        let socket = port.socket().unwrap();
        assert!(TcpStream::connect(("127.0.0.1", port.number())).is_err(), "nobody listens yet");
        listen(&socket, Backlog::new(8).unwrap()).unwrap();
        TcpStream::connect(("127.0.0.1", port.number())).unwrap();
        drop(socket);
        assert!(TcpStream::connect(("127.0.0.1", port.number())).is_err(), "gone with rank 0");
    }

    #[test]
    fn rank_0_may_bind_the_port_itself() {
        // std sets SO_REUSEADDR, as PyTorch does.
        let port = StorePort::reserve().unwrap();
        let _inherited = port.socket().unwrap();
        for address in ["127.0.0.1", "0.0.0.0"] {
            let _listener = TcpListener::bind((address, port.number())).unwrap();
            TcpStream::connect(("127.0.0.1", port.number())).unwrap();
        }
        // [::], where PyTorch listens first; a host without IPv6 has no such socket.
        let Ok(any) = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
        else {
            return;
        };
        setsockopt(&any, sockopt::ReuseAddr, &true).unwrap();
        setsockopt(&any, sockopt::Ipv6V6Only, &false).unwrap();
        let address = std::net::SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port.number(), 0, 0);
        if bind(any.as_raw_fd(), &SockaddrIn6::from(address)) != Err(nix::Error::EADDRNOTAVAIL) {
            listen(&any, Backlog::new(8).unwrap()).unwrap();
            TcpStream::connect(("127.0.0.1", port.number())).unwrap();
        }
    }

    #[test]
    fn nobody_else_is_given_the_port() {
        let held: Vec<_> = (0..200).map(|_| StorePort::reserve().unwrap()).collect();
        let mut numbers: Vec<_> = held.iter().map(StorePort::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), held.len());
        // A socket without SO_REUSEADDR cannot take it even by number.
        let plain =
            socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let taken = bind(plain.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, held[0].number()));
        assert_eq!(taken, Err(nix::Error::EADDRINUSE));
    }
}
