//! Connections between hosts: listening ports, probes of them, and measurements.
//!
//! A port answers only to a peer that sends the nonce, 32 random letters of this run: for some seconds it is open to
//! the whole network.

mod connect;
mod listener;
mod measure;
mod ports;

pub(crate) use listener::Listeners;
pub(crate) use measure::measure;
pub(crate) use ports::probe_ports;

use std::time::Duration;

/// Request to a listening port, sent after the nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProbeRequest {
    /// Answers with one byte.
    Greet,
    /// Sends every byte back.
    Echo,
    /// Answers with the number of bytes that arrive, and how long they took.
    Bulk,
}

impl ProbeRequest {
    const fn letter(self) -> u8 {
        match self {
            Self::Greet => b'g',
            Self::Echo => b'e',
            Self::Bulk => b'b',
        }
    }

    const fn of(letter: u8) -> Option<Self> {
        match letter {
            b'g' => Some(Self::Greet),
            b'e' => Some(Self::Echo),
            b'b' => Some(Self::Bulk),
            _ => None,
        }
    }
}

/// Number of letters in a nonce.
const NONCE_LEN: usize = 32;
/// Answers of a port to the nonce.
const WELCOME: u8 = b'w';
/// Maximum duration of a bulk transfer.
const BULK_TIME: Duration = Duration::from_millis(300);
/// Maximum number of bytes of a bulk transfer.
const BULK_BYTES: u64 = 32 << 20;
/// Time after which a bulk transfer without a single byte has stalled: three retransmissions.
const STALLED: Duration = Duration::from_millis(1800);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Outcome;

    const NONCE: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn ports_answer_connections_with_the_nonce() {
        let (_doors, ports) = Listeners::open(NONCE, &[0, 0]);
        let addresses: Vec<_> =
            ports.iter().map(|it| ([127, 0, 0, 1], *it.as_ref().unwrap()).into()).collect();
        assert_eq!(probe_ports(NONCE, &addresses), [Outcome::Open, Outcome::Open]);
        assert_eq!(
            probe_ports(&"x".repeat(32), &addresses),
            [Outcome::Stranger, Outcome::Stranger]
        );
        assert_eq!(probe_ports("short", &addresses), [Outcome::Stranger, Outcome::Stranger]);
    }

    #[test]
    fn closed_ports_are_refused_and_taken_ports_are_named() {
        let (addresses, ports) = Listeners::open(NONCE, &[0]);
        let port = *ports[0].as_ref().unwrap();
        let (_others, again) = Listeners::open(NONCE, &[port]);
        assert!(again[0].as_ref().unwrap_err().contains("in use"), "{again:?}");
        drop(addresses);
        // The accepting thread ends soon after.
        let closed = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            probe_ports(NONCE, &[([127, 0, 0, 1], port).into()]) == [Outcome::Refused]
        });
        assert!(closed);
    }

    #[test]
    fn a_port_that_was_tried_is_free_at_once() {
        let (addresses, ports) = Listeners::open(NONCE, &[0]);
        let port = *ports[0].as_ref().unwrap();
        for _ in 0..3 {
            assert_eq!(probe_ports(NONCE, &[([127, 0, 0, 1], port).into()]), [Outcome::Open]);
        }
        measure(NONCE, ([127, 0, 0, 1], port).into());
        drop(addresses);
        // Like a program that requires a free port, without even old connections.
        let bind = || {
            use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, socket};
            let flags = SockFlag::SOCK_CLOEXEC;
            let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
            bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &SockaddrIn::new(0, 0, 0, 0, port))
        };
        let free = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            bind().is_ok()
        });
        assert!(free, "{:?}", bind());
    }

    #[test]
    fn the_route_to_this_host_is_measured() {
        let (_doors, ports) = Listeners::open(NONCE, &[0]);
        let address = ([127, 0, 0, 1], *ports[0].as_ref().unwrap()).into();
        let measured = measure(NONCE, address);
        assert_eq!(measured.error, None);
        assert!(measured.round_trip > 0.0 && measured.slowest >= measured.round_trip);
        assert!(measured.bytes > 0 && measured.seconds > 0.0 && !measured.stalled);
        assert!(measured.bandwidth().unwrap() > 1e6, "{measured:?}");
    }
}
