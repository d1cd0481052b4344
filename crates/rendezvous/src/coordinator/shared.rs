//! Messages from other threads to the coordinator's thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::AgentId;
use crate::wake::Sender;

/// Message to the coordinator's thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Adds an agent in this process.
    Local(AgentId, OwnedFd),
    /// Adds an ssh session.
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
    /// The end of the job is not waited for.
    Abandon,
}

/// Sender to the coordinator's thread, and counter of the numbers of its agents.
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

    /// Sends a command. If the thread has ended, the command is dropped, and connections in it are closed.
    pub(super) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }
}
