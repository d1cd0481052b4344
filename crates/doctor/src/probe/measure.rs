//! Measurements of round-trip times, and of the bytes that arrive in a third of a second.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use super::connect::connect_within;
use super::ports::{TIMEOUT, enter};
use super::{BULK_TIME, ProbeRequest, STALLED};
use crate::cluster::Measured;

/// Measures the route to an address. Takes about half a second, and up to ten seconds if packets are lost.
pub(crate) fn measure(nonce: &str, address: SocketAddr) -> Measured {
    let mut measured = Measured::default();
    let before = segments();
    if let Err(error) = into(&mut measured, nonce, address) {
        measured.error = Some(error.to_string());
    }
    if let (Some(before), Some(after)) = (before, segments()) {
        measured.segments = after.sent.saturating_sub(before.sent);
        measured.sent_again = after.again.saturating_sub(before.again);
    }
    measured
}

fn into(measured: &mut Measured, nonce: &str, address: SocketAddr) -> io::Result<()> {
    let trips = round_trips(nonce, address)?;
    measured.round_trip = trips[trips.len() / 2].as_secs_f64();
    measured.slowest = trips[trips.len() - 1].as_secs_f64();
    let arrived = bulk(nonce, address, None)?;
    measured.bytes = arrived.bytes;
    measured.seconds = arrived.seconds;
    measured.stalled = arrived.bytes == 0;
    if measured.stalled {
        // Single bytes arrived. If packets of a smaller size also arrive, the size is the reason.
        measured.passes = SMALLER
            .into_iter()
            .find(|size| bulk(nonce, address, Some(*size)).is_ok_and(|arrived| arrived.bytes > 0));
    }
    Ok(())
}

/// Returns the sorted round-trip times, at least one.
fn round_trips(nonce: &str, address: SocketAddr) -> io::Result<Vec<Duration>> {
    let mut stream = open(nonce, address, ProbeRequest::Echo, None)?;
    let end = Instant::now() + ECHO_TIME;
    let mut trips = Vec::with_capacity(MAX_TRIPS);
    while trips.len() < MAX_TRIPS && (trips.is_empty() || Instant::now() < end) {
        let start = Instant::now();
        let mut byte = [0];
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        trips.push(start.elapsed());
    }
    trips.sort();
    Ok(trips)
}

struct Arrived {
    bytes: u64,
    seconds: f64,
}

/// Sends until the other side has measured enough and answers.
fn bulk(nonce: &str, address: SocketAddr, segment: Option<u32>) -> io::Result<Arrived> {
    let mut stream = open(nonce, address, ProbeRequest::Bulk, segment)?;
    // Bytes that are then left in the buffers are dropped, not sent.
    let at_once = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    setsockopt(&stream, sockopt::Linger, &at_once)?;
    stream.set_nonblocking(true)?;
    let chunk = vec![0; 256 << 10];
    let end = Instant::now() + STALLED + BULK_TIME + TIMEOUT;
    loop {
        let rest = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX);
        let mut wanted = [PollFd::new(stream.as_fd(), PollFlags::POLLIN | PollFlags::POLLOUT)];
        match poll(&mut wanted, timeout) {
            // The answer is small, but its acknowledgements may be lost like the data.
            Ok(0) => return Ok(Arrived { bytes: 0, seconds: 0.0 }),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let events = wanted[0].revents().unwrap_or(PollFlags::empty());
        if events.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
            break;
        }
        if events.contains(PollFlags::POLLOUT) {
            match stream.write(&chunk) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
    }
    stream.set_nonblocking(false)?;
    let mut answer = [0; 16];
    stream.read_exact(&mut answer)?;
    let (bytes, micros) = answer.split_at(8);
    let number = |bytes: &[u8]| bytes.iter().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte));
    Ok(Arrived { bytes: number(bytes), seconds: number(micros) as f64 / 1e6 })
}

fn open(
    nonce: &str,
    address: SocketAddr,
    request: ProbeRequest,
    segment: Option<u32>,
) -> io::Result<TcpStream> {
    let mut stream = connect_within(address, TIMEOUT, segment)?;
    if enter(&mut stream, nonce, request)? {
        Ok(stream)
    } else {
        Err(io::Error::other("another program answers there, not the doctor"))
    }
}

/// Number of TCP segments sent since this host's network stack was started.
struct Segments {
    sent: u64,
    again: u64,
}

/// Counts all connections together: the counters of one connection would need unsafe code.
fn segments() -> Option<Segments> {
    let text = std::fs::read_to_string("/proc/self/net/snmp").ok()?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let names = lines.next()?.split(' ');
    let values: Vec<&str> = lines.next()?.split(' ').collect();
    let of = |wanted| names.clone().position(|name| name == wanted).and_then(|at| values.get(at));
    Some(Segments { sent: of("OutSegs")?.parse().ok()?, again: of("RetransSegs")?.parse().ok()? })
}

const MAX_TRIPS: usize = 40;
const ECHO_TIME: Duration = Duration::from_millis(200);
/// Data per packet for packets of 1240 and 576 bytes, which pass through tunnels and the oldest links.
const SMALLER: [u32; 2] = [1200, 536];
