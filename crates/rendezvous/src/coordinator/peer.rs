//! The coordinator's side of one connection.

use std::sync::Arc;
use std::time::Instant;

use crate::connection::Connection;

/// Connection to an agent, or to a process that may join as one.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) wire: Connection,
    pub(super) stage: Stage,
    pub(super) origin: Origin,
    /// Name of the host for messages: the agent's own once it has joined.
    pub(super) host: Arc<str>,
    /// Number of bytes of output that were received and are not shown yet.
    pub(super) unshown: u64,
    /// `true` if the poll also waits until the connection can be written to.
    pub(super) polled_for_writing: bool,
    /// Reason for the end of the connection, if the session has supplied one.
    pub(super) explained: Option<String>,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// No message was received yet.
    Greeting,
    /// The peer may join; over TCP its first message proves that it has the secret.
    Joining,
    Member,
    /// The peer receives the remaining data and is then closed. It may still send.
    Closing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// The agent is in this process.
    Local,
    Session,
    Tcp(std::net::IpAddr),
}

impl Peer {
    pub(super) fn new(wire: Connection, stage: Stage, origin: Origin, host: &str) -> Self {
        Self {
            wire,
            stage,
            origin,
            host: host.into(),
            unshown: 0,
            polled_for_writing: false,
            explained: None,
        }
    }

    /// Returns `true` if a network connects the peer.
    pub(super) fn is_remote(&self) -> bool {
        self.origin != Origin::Local
    }

    /// Returns `true` if the peer has not joined.
    pub(super) fn is_stranger(&self) -> bool {
        matches!(self.origin, Origin::Tcp(_))
            && matches!(self.stage, Stage::Greeting | Stage::Joining)
    }
}

/// Session that has ended, and the time until which a reason may still be received.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) agent: crate::AgentId,
    pub(super) how: String,
    pub(super) until: Instant,
}
