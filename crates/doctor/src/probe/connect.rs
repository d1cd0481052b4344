//! Connections with a time limit and, if needed, with small packets.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt,
};

/// Connects. With `segment`, no packet in either direction carries more than that many bytes of data: the limit must be
/// set before the connection, which the standard library does not support.
pub(super) fn connect_within(
    address: SocketAddr,
    timeout: Duration,
    segment: Option<u32>,
) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, None)?;
    if let Some(segment) = segment {
        setsockopt(&socket, sockopt::TcpMaxSeg, &segment)?;
    }
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS) => {
            let end = Instant::now() + timeout;
            loop {
                let rest = end.saturating_duration_since(Instant::now());
                let timeout = PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX);
                let mut wanted = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
                match poll(&mut wanted, timeout) {
                    Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                    Ok(_) => break,
                    Err(Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from(socket);
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
