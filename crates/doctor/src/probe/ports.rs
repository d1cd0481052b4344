//! Tests of connections to other hosts.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use super::connect::connect_within;
use super::listener::is_timeout;
use super::{ProbeRequest, WELCOME};
use crate::cluster::Outcome;

/// Connects to all addresses at the same time: a firewall that drops packets costs the whole timeout.
pub(crate) fn probe_ports(nonce: &str, addresses: &[SocketAddr]) -> Vec<Outcome> {
    thread::scope(|scope| {
        let mut outcomes = Vec::with_capacity(addresses.len());
        for some in addresses.chunks(AT_ONCE) {
            let threads: Vec<_> =
                some.iter().map(|address| scope.spawn(move || at_one(nonce, *address))).collect();
            outcomes.extend(threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Outcome::Failed("a thread failed".to_owned()))
            }));
        }
        outcomes
    })
}

fn at_one(nonce: &str, address: SocketAddr) -> Outcome {
    match connect_within(address, TIMEOUT, None)
        .and_then(|mut stream| enter(&mut stream, nonce, ProbeRequest::Greet))
    {
        Ok(true) => Outcome::Open,
        Ok(false) => Outcome::Stranger,
        Err(error) => match error.kind() {
            ErrorKind::ConnectionRefused => Outcome::Refused,
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Outcome::Silent,
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Outcome::NoRoute,
            // Accepted and closed at once: a proxy whose other end is closed.
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Outcome::Stranger,
            _ => Outcome::Failed(error.to_string()),
        },
    }
}

/// Sends the nonce and the request. Returns `true` if the other side accepts the nonce.
pub(super) fn enter(
    stream: &mut TcpStream,
    nonce: &str,
    request: ProbeRequest,
) -> io::Result<bool> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut header = nonce.as_bytes().to_vec();
    header.push(request.letter());
    stream.write_all(&header)?;
    let mut answer = [0];
    match stream.read(&mut answer) {
        Ok(1) => Ok(answer[0] == WELCOME),
        Ok(_) => Ok(false),
        Err(error) if is_timeout(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Time limit of a connection. The kernel sends a second and a third packet after 1 s and 3 s.
pub(super) const TIMEOUT: Duration = Duration::from_millis(3500);
const AT_ONCE: usize = 64;
