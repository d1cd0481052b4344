//! Messages from other threads to the coordinator's thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::AgentId;
use crate::wake::Sender;

/// A message to the coordinator's thread.
#[derive(Debug)]
pub(super) enum Command {
    /// An agent in this process.
    Local(AgentId, OwnedFd),
    /// An ssh session.
    Session {
        agent: AgentId,
        reader: OwnedFd,
        writer: OwnedFd,
        host: String,
    },
    /// Reason why that session has ended.
    Explain(AgentId, String),
    Interrupt(i32),
    /// Signal to forward to all ranks, without other effects.
    Forward(i32),
    /// Output of an agent that has been shown.
    Shown(AgentId, u64),
    /// The end is not waited for.
    Abandon,
}

/// The way to the coordinator's thread, and the numbers of its agents.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    commands: Sender<Command>,
    agents: Arc<AtomicU64>,
}

impl Shared {
    pub(super) fn new(commands: Sender<Command>) -> Self {
        Self { commands, agents: Arc::default() }
    }

    pub(super) fn new_agent(&self) -> AgentId {
        AgentId(self.agents.fetch_add(1, Ordering::Relaxed))
    }

    /// A thread that has ended takes no commands: connections in them are closed.
    pub(super) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }
}
