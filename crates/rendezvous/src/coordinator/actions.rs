//! Performs the actions of the coordinator's state machine.

use std::io;
use std::time::{Duration, Instant, SystemTime};

use nix::sys::epoll::{EpollEvent, EpollFlags};
use serde::Serialize;

use super::event_loop::{EventLoop, FIRST};
use super::peer::{Origin, Peer, Stage};
use crate::connection::Connection;
use crate::etcd::LeaderLease;
use crate::{Action, AgentId, Event, Record, ToAgent};

impl EventLoop {
    pub(super) fn tell(&mut self, event: Event) {
        let actions = self.formation.handle(self.start.elapsed(), event);
        let begins = |it: &Action| matches!(it, Action::Send(_, ToAgent::Start(_)));
        if actions.iter().any(begins) && self.lease().is_some_and(|lease| !lease.is_held()) {
            self.say(
                "etcd does not answer and the lease has run out, so another host may be the coordinator: \
                 this one starts no new attempt",
            );
            return self.abandon();
        }
        let mut told_end = None;
        for action in actions {
            match action {
                Action::Send(agent, message) => {
                    told_end = matches!(message, ToAgent::End(_)).then_some(agent);
                    self.send(agent, &message);
                }
                Action::Adopt { agent, connection } => self.adopt(agent, connection),
                // A disconnected agent may come back until it is lost, over this connection or another one.
                Action::Close(agent) if told_end == Some(agent) => {
                    self.close_within(agent, self.limits.heartbeat_timeout());
                }
                Action::Close(agent) => self.close(agent),
                Action::Say(line) => self.say(&line),
                Action::Record(record) => self.record(record),
                Action::Finish(job_result) => {
                    if let Some(lease) = self.lease() {
                        lease.finish(job_result.code);
                    }
                    self.job_result = Some(job_result);
                }
            }
        }
    }

    /// Returns the lease of the election, if there was one.
    fn lease(&self) -> Option<&LeaderLease> {
        self.listener.as_ref().and_then(|listener| listener.lease.as_ref())
    }

    fn record(&mut self, Record { at, event }: Record) {
        if let Some(sink) = &mut self.sink {
            let age = self.start.elapsed().saturating_sub(at);
            let now = SystemTime::now();
            sink.record(now.checked_sub(age).unwrap_or(now), event);
        }
    }

    pub(super) fn say(&mut self, line: &str) {
        if let Some(sink) = &mut self.sink {
            sink.say(line);
        }
    }

    /// Adds a connection, unless the system cannot poll it.
    pub(super) fn enter(
        &mut self,
        agent: AgentId,
        wire: io::Result<Connection>,
        stage: Stage,
        origin: Origin,
        host: &str,
    ) {
        let Ok(wire) = wire else { return };
        let event = EpollEvent::new(EpollFlags::EPOLLIN, FIRST + agent.0);
        if self.epoll.add(wire.read_fd(), event).is_ok() {
            self.peers.insert(agent, Peer::new(wire, stage, origin, host));
        }
    }

    /// Moves an agent to another connection.
    fn adopt(&mut self, agent: AgentId, connection: AgentId) {
        self.remove(agent);
        let Some(peer) = self.peers.remove(&connection) else { return };
        let writes =
            if peer.polled_for_writing { EpollFlags::EPOLLOUT } else { EpollFlags::empty() };
        let mut event = EpollEvent::new(EpollFlags::EPOLLIN | writes, FIRST + agent.0);
        // It is one socket, and polled already.
        let _ = self.epoll.modify(peer.wire.read_fd(), &mut event);
        self.peers.insert(agent, peer);
        self.after_sending(agent);
    }

    /// Closes a connection now.
    pub(super) fn remove(&mut self, agent: AgentId) -> Option<Peer> {
        let peer = self.peers.remove(&agent)?;
        // The poll drops a descriptor that is closed, but not while a duplicate exists.
        let _ = self.epoll.delete(peer.wire.read_fd());
        if peer.polled_for_writing && !peer.wire.is_one_socket() {
            let _ = self.epoll.delete(peer.wire.write_fd());
        }
        if matches!(peer.stage, Stage::Member | Stage::Closing)
            && let Some(sink) = &mut self.sink
        {
            sink.progress(&peer.host, Vec::new());
        }
        Some(peer)
    }

    pub(super) fn send(&mut self, agent: AgentId, message: &impl Serialize) {
        if let Some(peer) = self.peers.get_mut(&agent) {
            peer.wire.send(message);
            self.after_sending(agent);
        }
    }

    /// Closes a connection once everything has been sent and the other side has closed it, too, or after a short time
    /// limit.
    pub(super) fn close(&mut self, agent: AgentId) {
        self.close_within(agent, Duration::ZERO);
    }

    /// Closes a connection as [`close`](Self::close) does, with a time limit for a TCP connection that counts from the
    /// last data of the other side. Closes at once if the other side has been silent for so long that it would not
    /// receive anything either.
    fn close_within(&mut self, agent: AgentId, silence: Duration) {
        let silent = |peer: &Peer| {
            let is_member = peer.is_remote() && matches!(peer.stage, Stage::Member);
            is_member && peer.wire.last_received().elapsed() >= self.limits.heartbeat_timeout()
        };
        if self.peers.get(&agent).is_some_and(silent) {
            self.remove(agent);
            return;
        }
        if let Some(peer) = self.peers.get_mut(&agent)
            && !matches!(peer.stage, Stage::Closing)
        {
            peer.stage = Stage::Closing;
            let lost = match peer.origin {
                Origin::Tcp(_) => silence,
                Origin::Local | Origin::Session => Duration::ZERO,
            };
            let until = (Instant::now() + LAST_WORDS).max(peer.wire.last_received() + lost);
            self.closing.push((until, agent));
            self.after_sending(agent);
        }
    }

    pub(super) fn after_sending(&mut self, agent: AgentId) {
        let Some(peer) = self.peers.get_mut(&agent) else { return };
        let waits = peer.wire.needs_write();
        if peer.wire.write_error().is_some() {
            self.unread.push(agent);
        }
        if waits != peer.polled_for_writing {
            peer.polled_for_writing = waits;
            // Fails only for a descriptor that is not polled.
            let _ = poll_for_writing(&self.epoll, &peer.wire, FIRST + agent.0, waits);
        }
        if !waits && matches!(peer.stage, Stage::Closing) {
            peer.wire.finish();
            if peer.origin == Origin::Local {
                // The peer can still read the data that is left in the socket.
                self.remove(agent);
            }
        }
    }
}

fn poll_for_writing(
    epoll: &nix::sys::epoll::Epoll,
    wire: &Connection,
    token: u64,
    waits: bool,
) -> nix::Result<()> {
    let both = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT;
    match (wire.is_one_socket(), waits) {
        (true, true) => epoll.modify(wire.read_fd(), &mut EpollEvent::new(both, token)),
        (true, false) => {
            epoll.modify(wire.read_fd(), &mut EpollEvent::new(EpollFlags::EPOLLIN, token))
        }
        (false, true) => epoll.add(wire.write_fd(), EpollEvent::new(EpollFlags::EPOLLOUT, token)),
        (false, false) => epoll.delete(wire.write_fd()),
    }
}

/// Time limit for an agent to close its end. It has received all messages by then.
const LAST_WORDS: Duration = Duration::from_secs(2);
