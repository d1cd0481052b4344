//! Ports on which this host listens during an examination.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{Shutdown, shutdown};

use super::{BULK_BYTES, BULK_TIME, NONCE_LEN, ProbeRequest, STALLED, WELCOME};

/// Listening ports, which answer until this is dropped.
#[derive(Debug)]
pub(crate) struct Listeners {
    closed: Arc<AtomicBool>,
    listeners: Vec<Arc<TcpListener>>,
}

impl Listeners {
    /// Listens on all addresses. Returns the port of each, or the reason why it cannot be opened.
    pub(crate) fn open(nonce: &str, ports: &[u16]) -> (Self, Vec<Result<u16, String>>) {
        let mut addresses = Self { closed: Arc::default(), listeners: Vec::new() };
        let peers = Arc::new(AtomicUsize::new(0));
        let mut open = |port: u16| -> io::Result<u16> {
            let listener = Arc::new(listen(port)?);
            let address = listener.local_addr()?;
            addresses.listeners.push(Arc::clone(&listener));
            let closed = Arc::clone(&addresses.closed);
            let (nonce, peers) = (nonce.to_owned(), Arc::clone(&peers));
            thread::Builder::new().spawn(move || accept(&listener, &nonce, &closed, &peers))?;
            Ok(address.port())
        };
        let ports = ports.iter().map(|it| open(*it).map_err(|it| plain(&it))).collect();
        (addresses, ports)
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Release);
        for listener in &self.listeners {
            // On Linux this ends `accept`. A connection to wake it up would leave the port busy for a minute.
            let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
        }
    }
}

/// Listens on IPv6 and IPv4 together, if the host has both.
fn listen(port: u16) -> io::Result<TcpListener> {
    let both = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port));
    match both {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        }
        both => both,
    }
}

fn accept(listener: &TcpListener, nonce: &str, closed: &AtomicBool, peers: &Arc<AtomicUsize>) {
    for stream in listener.incoming() {
        if closed.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else {
            // Out of file descriptors, for example: must not spin.
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        if peers.fetch_add(1, Ordering::AcqRel) >= MAX_PEERS {
            peers.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let (nonce, leaving) = (nonce.to_owned(), Arc::clone(peers));
        let served = thread::Builder::new().spawn(move || {
            // Errors of a single peer are ignored.
            let _ = serve(stream, &nonce);
            leaving.fetch_sub(1, Ordering::AcqRel);
        });
        if served.is_err() {
            peers.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn serve(mut stream: TcpStream, nonce: &str) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut header = [0; NONCE_LEN + 1];
    stream.read_exact(&mut header)?;
    if header[..NONCE_LEN] != *nonce.as_bytes() {
        return Ok(());
    }
    let Some(request) = ProbeRequest::of(header[NONCE_LEN]) else { return Ok(()) };
    stream.write_all(&[WELCOME])?;
    match request {
        // The peer closes first: the side that does keeps the port busy for a minute, and this one may be the port that
        // a job uses next.
        ProbeRequest::Greet => stream.read(&mut [0]).map(drop),
        ProbeRequest::Echo => echo(&mut stream),
        ProbeRequest::Bulk => bulk(&mut stream),
    }
}

fn echo(stream: &mut TcpStream) -> io::Result<()> {
    let mut byte = [0];
    for _ in 0..MAX_ECHOES {
        if stream.read(&mut byte)? == 0 {
            break;
        }
        stream.write_all(&byte)?;
    }
    Ok(())
}

/// The receiver measures the time: bytes that the sender has written may still be in its own buffers.
fn bulk(stream: &mut TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; 256 << 10];
    stream.set_read_timeout(Some(STALLED))?;
    let mut bytes = match stream.read(&mut buffer) {
        Ok(length) => length as u64,
        Err(error) if is_timeout(&error) => 0,
        Err(error) => return Err(error),
    };
    let start = Instant::now();
    let mut whole = bytes == 0;
    while !whole && bytes < BULK_BYTES {
        let rest = BULK_TIME.saturating_sub(start.elapsed());
        if rest.is_zero() {
            break;
        }
        stream.set_read_timeout(Some(rest))?;
        match stream.read(&mut buffer) {
            Ok(0) => whole = true,
            Ok(length) => bytes += length as u64,
            Err(error) if is_timeout(&error) => break,
            Err(error) => return Err(error),
        }
    }
    let micros = start.elapsed().as_micros() as u64;
    stream.write_all(&bytes.to_be_bytes())?;
    stream.write_all(&micros.to_be_bytes())?;
    // The sender closes the connection: if this side did, with bytes unread, the answer could be lost.
    let end = Instant::now() + TIMEOUT;
    stream.set_read_timeout(Some(BULK_TIME))?;
    while Instant::now() < end {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Err(error) if !is_timeout(&error) => break,
            _ => {}
        }
    }
    Ok(())
}

pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Removes the number that the standard library adds.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    text.to_lowercase()
}

const MAX_PEERS: usize = 256;
const MAX_ECHOES: usize = 1000;
const TIMEOUT: Duration = Duration::from_secs(3);
