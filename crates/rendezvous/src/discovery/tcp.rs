//! Discovery at an address that all agents are given.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use brigade_rank_env::text::printable;
use nix::poll::PollFlags;

use super::backoff::RetryPolicy;
use super::notices::Notices;
use super::{RendezvousError, RendezvousNotice, RendezvousPlan};
use crate::connection::{Connection, LinkError};
use crate::handshake::{ClientHandshake, Denial, MAX_GREETING};
use crate::listener::{BindAddress, Listener, is_own, prepared};
use crate::{Link, MAX_FRAME_LEN, TimeLimits};

/// Listens at this port, or returns the error.
pub(super) fn serve(
    plan: &RendezvousPlan,
    address: &str,
    port: u16,
) -> Result<RendezvousNotice, RendezvousError> {
    match listen(plan, address, port) {
        Err(source) if source.kind() == io::ErrorKind::AddrInUse => {
            Err(RendezvousError::PortTaken { port })
        }
        Err(source) => Err(RendezvousError::CannotListen { port, source }),
        Ok(listener) => Ok(RendezvousNotice::Serve { listener, address: plain(address).into() }),
    }
}

fn listen(plan: &RendezvousPlan, address: &str, port: u16) -> io::Result<Listener> {
    let bind_address = match plain(address).parse::<IpAddr>() {
        Ok(address) if address.is_loopback() => BindAddress::Loopback(address),
        Err(_) if address == "localhost" => BindAddress::Loopback(Ipv4Addr::LOCALHOST.into()),
        // Whatever the name resolves to here, other hosts may resolve it to another address.
        _ => BindAddress::Unspecified,
    };
    Listener::bind(port, bind_address, &plan.run_id, plan.secret.clone())
}

/// Tries to serve, if this agent may, and to find the coordinator, until one of the two succeeds.
pub(super) fn meet(
    plan: &RendezvousPlan,
    address: &str,
    port: u16,
    serve: Option<bool>,
    notices: &Notices,
) -> Result<RendezvousNotice, RendezvousError> {
    let endpoint = Endpoint::new(plan, address, port);
    let mut retry = RetryPolicy::new(plan, endpoint.name(), MAX_PAUSE);
    let mut taken_since = None;
    loop {
        let round = Instant::now();
        let found = endpoint.resolve();
        let own = |found: &Vec<SocketAddr>| found.iter().copied().any(is_own);
        if serve.unwrap_or_else(|| found.as_ref().is_ok_and(own)) {
            match self::serve(plan, address, port) {
                Err(RendezvousError::PortTaken { .. }) => taken_since = taken_since.or(Some(round)),
                served => return served,
            }
        }
        let met = found.map_err(Failure::Later).and_then(|all| endpoint.try_all(&all, notices));
        let last = match met {
            Ok(link) => return Ok(RendezvousNotice::Join(link)),
            // Another agent of this host would have responded.
            Err(Failure::Now(RendezvousError::NotACoordinator { .. })) if taken_since.is_some() => {
                return Err(RendezvousError::PortTaken { port });
            }
            Err(Failure::Now(error)) => return Err(error),
            Err(Failure::Later(_)) if taken_since.is_some_and(|since| since.elapsed() >= TAKEN) => {
                return Err(RendezvousError::PortTaken { port });
            }
            Err(Failure::Later(text)) => text,
        };
        retry.pause(last, notices)?;
    }
}

/// Reason why it did not work this time.
pub(super) enum Failure {
    /// Permanent failure.
    Now(RendezvousError),
    Later(String),
}

/// Address at which a coordinator may listen.
pub(super) struct Endpoint<'a> {
    plan: &'a RendezvousPlan,
    address: &'a str,
    port: u16,
}

impl<'a> Endpoint<'a> {
    pub(super) fn new(plan: &'a RendezvousPlan, address: &'a str, port: u16) -> Self {
        Self { plan, address: plain(address), port }
    }

    pub(super) fn name(&self) -> String {
        // The address may come from etcd.
        let (address, port) = (printable(self.address), self.port);
        if address.contains(':') {
            format!("[{address}]:{port}")
        } else {
            format!("{address}:{port}")
        }
    }

    /// Connects to the coordinator at this address.
    pub(super) fn connect(&self, notices: &Notices) -> Result<Link, Failure> {
        let all = self.resolve().map_err(Failure::Later)?;
        self.try_all(&all, notices)
    }

    fn resolve(&self) -> Result<Vec<SocketAddr>, String> {
        let all: Vec<_> = (self.address, self.port)
            .to_socket_addrs()
            .map_err(|error| format!("{} has no address: {error}", printable(self.address)))?
            .collect();
        if all.is_empty() {
            return Err(format!("{} has no address", printable(self.address)));
        }
        Ok(all)
    }

    fn try_all(&self, all: &[SocketAddr], notices: &Notices) -> Result<Link, Failure> {
        let mut last = Failure::Later("it has no address".into());
        for address in all {
            match self.try_one(address, notices) {
                Err(Failure::Later(text)) => last = Failure::Later(text),
                done => return done,
            }
        }
        Err(last)
    }

    fn try_one(&self, address: &SocketAddr, notices: &Notices) -> Result<Link, Failure> {
        let later = |error: io::Error| Failure::Later(crate::plain_text(&error));
        let stream = TcpStream::connect_timeout(address, TimeLimits::CONNECT).map_err(later)?;
        self.introduce(stream, TimeLimits::ANSWER, notices).map(|link| link.to(*address))
    }

    /// Performs the handshake over a connection, by which both sides prove that they have the same secret. `limit` is
    /// the time limit for the coordinator's answer.
    pub(super) fn introduce(
        &self,
        stream: TcpStream,
        limit: Duration,
        notices: &Notices,
    ) -> Result<Link, Failure> {
        let later = |error: io::Error| Failure::Later(crate::plain_text(&error));
        let stream = prepared(stream, self.plan.limits).map_err(later)?;
        if is_self(&stream) {
            return Err(Failure::Later("connection refused".into()));
        }
        let wire = Connection::new(stream.into(), None, MAX_UNSENT).map_err(later)?;
        self.greet(wire, limit, notices)
    }

    fn greet(
        &self,
        mut wire: Connection,
        limit: Duration,
        notices: &Notices,
    ) -> Result<Link, Failure> {
        let system = |error| Failure::Now(RendezvousError::System(error));
        let endpoint = self.name();
        let start = ClientHandshake::start(self.plan.secret.as_ref());
        let (handshake, hello) = start.map_err(|error| system(io::Error::other(error)))?;
        wire.limit_frames(MAX_ANSWER_LEN);
        wire.send_record(&hello);
        let until = Instant::now() + limit;
        let record = loop {
            match wire.receive_record(MAX_GREETING) {
                Ok(Some(record)) => break record,
                Ok(None) => {}
                Err(LinkError::Protocol(error)) => {
                    let how = error.to_string();
                    return Err(Failure::Now(RendezvousError::NotACoordinator { endpoint, how }));
                }
                // A load balancer without a backend yet, or a job that is ending.
                Err(error) => return Err(Failure::Later(error.to_string())),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::Later("it accepts connections, but does not answer".into()));
            }
            if notices.wait(Some((wire.read_fd(), PollFlags::POLLIN)), left) {
                return Err(system(io::ErrorKind::Interrupted.into()));
            }
        };
        match handshake.finish(&record) {
            Ok(channel) => {
                wire.secure(Box::new(channel));
                wire.lift_limit();
                Link::of(wire, Some(self.plan.limits)).map_err(system)
            }
            Err(Denial::Refused(reason)) => {
                Err(Failure::Now(RendezvousError::Denied { endpoint, reason }))
            }
            Err(Denial::Unproved) => Err(Failure::Now(RendezvousError::Impostor { endpoint })),
            Err(Denial::NotBrigade) => {
                let how = "it does not use Brigade's protocol".into();
                Err(Failure::Now(RendezvousError::NotACoordinator { endpoint, how }))
            }
        }
    }
}

/// Returns an address without the brackets of IPv6.
fn plain(address: &str) -> &str {
    address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address)
}

/// Returns `true` if a socket is connected to itself, which TCP allows if the system chooses an unused destination port
/// as the local one.
fn is_self(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(near), Ok(far)) if near == far)
}

const MAX_PAUSE: Duration = Duration::from_millis(500);
/// Time within which a coordinator that is about to end releases the port.
const TAKEN: Duration = Duration::from_secs(4);
/// Maximum length of an answer: a reason may quote sent texts.
const MAX_ANSWER_LEN: usize = 64 << 10;
/// Maximum amount of unsent data: the output that may wait, and a message of maximum length.
const MAX_UNSENT: usize = 2 * MAX_FRAME_LEN;
