//! The socket at which agents of other hosts meet the coordinator.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::sockopt::{Ipv6V6Only, ReuseAddr, TcpUserTimeout};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn6, bind, listen, setsockopt, socket,
};

use crate::TimeLimits;
use crate::connection::Connection;
use crate::etcd::LeaderLease;
use crate::secret::Secret;

/// Listening socket of a coordinator, and the hosts that can reach it.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    port: u16,
    bind_address: BindAddress,
    pub(crate) secret: Option<Secret>,
    pub(crate) run_id: String,
    pub(crate) limits: Limits,
    /// Lease of the election, if the coordinator was elected.
    pub(crate) lease: Option<LeaderLease>,
}

impl Listener {
    /// Listens at this port, or at a free one for 0: on the loopback address alone, or on all addresses of this host,
    /// both IPv4 and IPv6 if it has both.
    ///
    /// # Errors
    /// The port is taken or not allowed.
    pub fn bind(
        port: u16,
        bind_address: BindAddress,
        run_id: &str,
        secret: Option<Secret>,
    ) -> io::Result<Self> {
        let socket = match bind_address {
            BindAddress::Loopback(address) => TcpListener::bind((address, port))?,
            BindAddress::Unspecified => match both_families(port) {
                // A host without IPv6.
                Err(nix::Error::EAFNOSUPPORT | nix::Error::EADDRNOTAVAIL) => {
                    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?
                }
                socket => socket?,
            },
        };
        socket.set_nonblocking(true)?;
        let port = socket.local_addr()?.port();
        let limits = Limits::default();
        Ok(Self { socket, port, bind_address, secret, run_id: run_id.into(), limits, lease: None })
    }

    /// Returns the port that the listener is bound to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns `true` if hosts of a network can reach the listener and no secret is required: any process that reaches
    /// the port can join the job.
    #[must_use]
    pub fn is_unguarded(&self) -> bool {
        self.secret.is_none() && self.bind_address == BindAddress::Unspecified
    }

    /// Accepts the next connection, if there is one, and returns it with the address of its peer.
    pub(crate) fn accept(&self, limits: TimeLimits) -> io::Result<(Connection, IpAddr)> {
        let (stream, address) = self.socket.accept()?;
        let wire = Connection::new(prepared(stream, limits)?.into(), None, MAX_UNSENT)?;
        Ok((wire, address.ip().to_canonical()))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Address at which a listener is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindAddress {
    /// A loopback address: only processes of this host reach it.
    Loopback(IpAddr),
    /// All addresses of this host.
    Unspecified,
}

/// Limits for connections that have not joined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of such connections.
    pub(crate) strangers: usize,
    /// Time limit for joining.
    pub(crate) greeting: Duration,
    /// Time for which a connection keeps its slot even if all slots are used and other connections wait.
    pub(crate) grace: Duration,
}

/// A quarter of the descriptors that this process may have, at most 1024; 10 s to join; half a second without
/// displacement, which is many round trips.
impl Default for Limits {
    fn default() -> Self {
        let open = getrlimit(Resource::RLIMIT_NOFILE).map_or(MAX_STRANGERS, |limit| limit.0 / 4);
        Self {
            strangers: usize::try_from(open.min(MAX_STRANGERS)).unwrap_or(64),
            greeting: TimeLimits::GREETING,
            grace: Duration::from_millis(500),
        }
    }
}

const MAX_STRANGERS: u64 = 1024;

/// Sets the socket options: messages are sent without delay, and the kernel closes a connection later than both sides
/// would.
pub(crate) fn prepared(
    stream: std::net::TcpStream,
    limits: TimeLimits,
) -> io::Result<std::net::TcpStream> {
    stream.set_nodelay(true)?;
    let limit = u32::try_from(limits.kernel().as_millis()).unwrap_or(u32::MAX);
    setsockopt(&stream, TcpUserTimeout, &limit)?;
    Ok(stream)
}

fn both_families(port: u16) -> nix::Result<TcpListener> {
    let fd = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, ReuseAddr, &true)?;
    setsockopt(&fd, Ipv6V6Only, &false)?;
    let any = std::net::SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0);
    bind(fd.as_raw_fd(), &SockaddrIn6::from(any))?;
    // A thousand agents may connect at once. The kernel reduces the backlog to its maximum.
    listen(&fd, Backlog::MAXALLOWABLE)?;
    Ok(TcpListener::from(fd))
}

/// Returns `true` if this is an address of this host.
pub(crate) fn is_own(address: SocketAddr) -> bool {
    let ip = address.ip().to_canonical();
    ip.is_loopback()
        || nix::ifaddrs::getifaddrs().is_ok_and(|mut all| {
            all.any(|interface| {
                let Some(address) = interface.address else { return false };
                let v4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
                let v6 = address.as_sockaddr_in6().map(|address| IpAddr::from(address.ip()));
                v4.or(v6) == Some(ip)
            })
        })
}

/// Maximum number of unread bytes of an agent. Most messages to it are short.
pub(crate) const MAX_UNSENT: usize = 64 << 10;
