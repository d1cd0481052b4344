//! Data that is received over the connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::EpollFlags;

use super::event_loop::EventLoop;
use super::output::{Credit, Piece};
use super::peer::{Ended, Origin, Stage};
use crate::connection::LinkError;
use crate::handshake::{self, Answer, MAX_GREETING};
use crate::{AgentId, Event, FromAgent, Join, MAX_FRAME_LEN, OUTPUT_CREDIT, Stream};

impl EventLoop {
    /// Handles a connection that is ready for reading or writing.
    pub(super) fn ready(&mut self, agent: AgentId, what: EpollFlags) {
        if what.intersects(EpollFlags::EPOLLOUT | EpollFlags::EPOLLERR)
            && let Some(peer) = self.peers.get_mut(&agent)
        {
            peer.wire.flush();
            self.after_sending(agent);
        }
        if what != EpollFlags::EPOLLOUT {
            self.read(agent);
        }
    }

    /// Reads messages up to a limit, so that no connection keeps the others waiting.
    pub(super) fn read(&mut self, agent: AgentId) {
        for _ in 0..MAX_MESSAGES {
            if !self.read_one(agent) {
                return;
            }
        }
        self.unread.push(agent);
    }

    /// Returns `false` when there is nothing more.
    fn read_one(&mut self, agent: AgentId) -> bool {
        let Some(peer) = self.peers.get_mut(&agent) else { return false };
        let before = peer.wire.last_received();
        let result = match &mut peer.stage {
            Stage::Greeting => match peer.wire.receive_record(MAX_GREETING) {
                Ok(Some(record)) => {
                    self.greet(agent, &record);
                    return true;
                }
                Ok(None) => Ok(None),
                Err(error) => Err(error),
            },
            Stage::Joining | Stage::Member | Stage::Closing => peer.wire.receive::<FromAgent>(),
        };
        match result {
            Ok(Some(message)) => {
                self.on_message(agent, message);
                true
            }
            Ok(None) => {
                // A part of a long message is a sign of life, too.
                let alive =
                    matches!(peer.stage, Stage::Member) && peer.wire.last_received() > before;
                if alive {
                    self.tell(Event::Alive { agent });
                }
                false
            }
            Err(error) => {
                self.lost(agent, &error);
                false
            }
        }
    }

    fn greet(&mut self, agent: AgentId, record: &[u8]) {
        let (Some(listener), Some(peer)) = (&self.listener, self.peers.get_mut(&agent)) else {
            return;
        };
        match handshake::answer(record, listener.secret.as_ref()) {
            Answer::Accept(record, channel) => {
                peer.stage = Stage::Joining;
                peer.wire.send_record(&record);
                peer.wire.secure(channel);
                self.after_sending(agent);
            }
            Answer::Refuse(record, reason) => {
                peer.wire.send_record(&record);
                self.close(agent);
                self.say_refused(agent, &reason);
            }
            Answer::Ignore => self.turn_away(agent),
        }
    }

    /// Reports a refusal to the user once per address, because a refused host may retry.
    fn say_refused(&mut self, agent: AgentId, reason: &str) {
        let Some(Origin::Tcp(address)) = self.peers.get(&agent).map(|peer| peer.origin) else {
            return;
        };
        if self.refused.len() < MAX_REFUSED && !self.refused.contains(&address) {
            self.refused.push(address);
            self.say(&format!("refused {address}: {reason}"));
        }
    }

    fn on_message(&mut self, agent: AgentId, message: FromAgent) {
        let Some(peer) = self.peers.get_mut(&agent) else { return };
        match (&peer.stage, message.printable()) {
            (Stage::Joining, FromAgent::Join(join)) => self.join(agent, join),
            (Stage::Joining, _) => self.drop_peer(agent, "it sent a message before it joined"),
            // Output of a closing connection is shown, too.
            (Stage::Member | Stage::Closing, FromAgent::Output { stream, bytes }) => {
                self.output(agent, stream, bytes);
            }
            (Stage::Member | Stage::Closing, FromAgent::Say { text }) => {
                let line = format!("{}: {text}", peer.host);
                self.say(&line);
            }
            (Stage::Member, FromAgent::Progress { ranks }) => {
                let host = Arc::clone(&peer.host);
                if let Some(sink) = &mut self.sink {
                    sink.progress(&host, ranks);
                }
                self.tell(Event::Alive { agent });
            }
            (Stage::Member, message) => self.tell(Event::Message { agent, message }),
            (Stage::Closing | Stage::Greeting, _) => {}
        }
    }

    fn join(&mut self, agent: AgentId, mut join: Join) {
        let Some(peer) = self.peers.get_mut(&agent) else { return };
        if let (Some(listener), Origin::Tcp(_)) = (&self.listener, peer.origin) {
            peer.wire.lift_limit();
            // The name of this job must not be disclosed to an agent of another job.
            let ours = peer.wire.job_tag(&listener.run_id).is_some_and(|tag| tag == join.run_id);
            join.run_id = if ours { listener.run_id.clone() } else { String::new() };
        }
        peer.stage = Stage::Member;
        peer.host = join.host.as_str().into();
        let seen = match peer.origin {
            Origin::Tcp(address) => Some(address.to_string()),
            Origin::Local | Origin::Session => None,
        };
        let remote = peer.is_remote();
        self.tell(Event::Joined { agent, join, seen, remote });
    }

    fn output(&mut self, agent: AgentId, stream: Stream, bytes: Vec<u8>) {
        let Some(peer) = self.peers.get_mut(&agent) else { return };
        let count = bytes.len() as u64;
        peer.unshown += count;
        if peer.unshown > MAX_UNSHOWN {
            return self.drop_peer(agent, "it sent more output than it may");
        }
        let credit = Credit { shared: self.shared.clone(), agent, bytes: count };
        let host = Arc::clone(&peer.host);
        let piece = Piece { host, stream, bytes, _credit: credit };
        match &mut self.sink {
            Some(sink) => sink.output(piece),
            None => drop(piece),
        }
        self.tell(Event::Alive { agent });
    }

    /// Disconnects a peer that has violated the protocol.
    fn drop_peer(&mut self, agent: AgentId, how: &str) {
        if self.remove(agent).is_some() {
            self.tell(Event::Closed { agent, how: how.into() });
        }
    }

    fn lost(&mut self, agent: AgentId, error: &LinkError) {
        let Some(peer) = self.remove(agent) else { return };
        let session = peer.origin == Origin::Session;
        match peer.stage {
            Stage::Closing | Stage::Greeting => {}
            Stage::Joining if !session => {}
            Stage::Joining | Stage::Member => match peer.explained {
                Some(how) => {
                    self.ended.retain(|ended| ended.agent != agent);
                    self.tell(Event::Closed { agent, how });
                }
                None if session => {
                    let until = Instant::now() + EXPLANATION;
                    self.ended.push(Ended { agent, how: error.to_string(), until });
                }
                None => {
                    let how = error.to_string();
                    let over_tcp = matches!(peer.origin, Origin::Tcp(_));
                    let reset = matches!(error, LinkError::Reset);
                    self.tell(if over_tcp && (reset || matches!(error, LinkError::Broken(_))) {
                        Event::Disconnected { agent, how, reset }
                    } else {
                        Event::Closed { agent, how }
                    });
                }
            },
        }
    }

    /// Handles the reason for the end of a session.
    pub(super) fn explain(&mut self, agent: AgentId, how: String) {
        if let Some(at) = self.ended.iter().position(|ended| ended.agent == agent) {
            self.ended.swap_remove(at);
            self.tell(Event::Closed { agent, how });
        } else if let Some(peer) = self.peers.get_mut(&agent) {
            peer.explained = Some(how.clone());
            self.ended.push(Ended { agent, how, until: Instant::now() + EXPLANATION });
        }
    }

    /// Handles the end of a session, with its reason if it has come in time.
    pub(super) fn gone(&mut self, ended: Ended) {
        let Ended { agent, how, .. } = ended;
        if self.remove(agent).is_none_or(|peer| !matches!(peer.stage, Stage::Closing)) {
            self.tell(Event::Closed { agent, how });
        }
    }
}

/// Maximum number of messages of one agent that are read before the others get their turn.
const MAX_MESSAGES: usize = 64;
/// Maximum amount of unshown output in bytes: an agent keeps to its credit, except that the last piece may exceed it.
const MAX_UNSHOWN: u64 = OUTPUT_CREDIT + MAX_FRAME_LEN as u64;
/// Time that the end of a session waits for its reason.
const EXPLANATION: Duration = Duration::from_millis(500);
const MAX_REFUSED: usize = 64;
